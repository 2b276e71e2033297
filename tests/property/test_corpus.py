"""Everything that ever taught the coverage-guided fuzzer something new (scripts/fuzz_guided.py), played again."""

import contextlib
from pathlib import Path

import pytest

from flowrt.errors import RemoteProtocolError
from flowrt.protocol.codec import decode
from flowrt.protocol.messages import MESSAGES
from tests.simulation import fuzz_targets

CORPUS = Path(__file__).parents[1] / "corpus"
LEAST = 100


@pytest.mark.slow
@pytest.mark.parametrize("target", ["codec", "core"])
def test_the_corpus_finds_nothing(target: str) -> None:
    lines = (CORPUS / f"{target}.hex").read_text().split()
    assert len(lines) > LEAST, "the corpus is empty: run scripts/fuzz_guided.py"
    for line in lines:
        getattr(fuzz_targets, target)(bytes.fromhex(line))


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
    spoken = fuzz_targets._spoken(fuzz_targets.conversation(seed))
    assert len(spoken) >= 5
    for _, words in spoken:
        fuzz_targets.codec(words)
        decode(words)
