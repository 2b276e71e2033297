"""Everything that ever taught the coverage-guided fuzzer something new (scripts/fuzz_guided.py), played again."""

import contextlib
from pathlib import Path

import pytest

from flowrt.errors import RemoteProtocolError
from flowrt.testing import targets
from flowrt.wire.codec import decode
from flowrt.wire.messages import MESSAGES

CORPUS = Path(__file__).parents[1] / "corpus"
LEAST = 100


@pytest.mark.parametrize("target", ["codec", "mind"])
def test_the_corpus_finds_nothing(target: str) -> None:
    lines = (CORPUS / f"{target}.hex").read_text().split()
    assert len(lines) > LEAST, "the corpus is empty: run scripts/fuzz_guided.py"
    for line in lines:
        getattr(targets, target)(bytes.fromhex(line))


def test_every_kind_of_message_is_in_it() -> None:
    """Else it is of another version of the wire: what it once reached is refused at the door."""
    reached = set()
    for line in (CORPUS / "codec.hex").read_text().split():
        with contextlib.suppress(RemoteProtocolError):
            reached.add(type(decode(bytes.fromhex(line))))
    assert {kind.__name__ for kind in set(MESSAGES) - reached} == set()


@pytest.mark.parametrize("seed", range(20))
def test_conversations_are_conversations(seed: int) -> None:
    """The targets above are not fed with what is refused before it is looked at."""
    spoken = targets._spoken(targets.conversation(seed))
    assert len(spoken) >= 5
    for _, words in spoken:
        targets.codec(words)
        targets.decode(words)
