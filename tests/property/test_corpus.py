"""Everything that ever taught the coverage-guided fuzzer something new (scripts/fuzz_guided.py), played again."""

from pathlib import Path

import pytest

from flowrt.testing import targets

CORPUS = Path(__file__).parents[1] / "corpus"
LEAST = 100


@pytest.mark.parametrize("target", ["codec", "mind"])
def test_the_corpus_finds_nothing(target: str) -> None:
    lines = (CORPUS / f"{target}.hex").read_text().split()
    assert len(lines) > LEAST, "the corpus is empty: run scripts/fuzz_guided.py"
    for line in lines:
        getattr(targets, target)(bytes.fromhex(line))


@pytest.mark.parametrize("seed", range(20))
def test_conversations_are_conversations(seed: int) -> None:
    """The targets above are not fed with what is refused before it is looked at."""
    spoken = targets._spoken(targets.conversation(seed))
    assert len(spoken) >= 5
    for _, words in spoken:
        targets.codec(words)
        targets.decode(words)
