"""Who meets whom, and when: each of several probes every other once, two by two (the circle method)."""

ROUND_S = 15.0
"""For two to meet, both ways; over a lane that works it takes less than half of that."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Everybody meets everybody once, in rounds in which nobody is wanted twice."""
    places: list[int] = list(range(count + count % 2))
    played = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        played.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return played


def longest_s(count: int) -> float:
    """How long the meetings of so many may take."""
    return len(rounds(count)) * ROUND_S
