"""Replays the corpus of the coverage-guided fuzzer (scripts/fuzz_guided.py)."""

import contextlib
from pathlib import Path

import pytest

from flowrt.errors import RemoteProtocolError
from flowrt.protocol.codec import decode
from flowrt.protocol.messages import MESSAGES
from tests.simulation import fuzz_targets

CORPUS = Path(__file__).parents[1] / "corpus"
MIN_ENTRIES = 100


@pytest.mark.slow
@pytest.mark.parametrize("target", ["codec", "core"])
def test_no_corpus_entry_fails(target: str) -> None:
    lines = (CORPUS / f"{target}.hex").read_text().split()
    assert len(lines) > MIN_ENTRIES, "the corpus is empty: run scripts/fuzz_guided.py"
    for line in lines:
        getattr(fuzz_targets, target)(bytes.fromhex(line))


def test_the_corpus_contains_every_message_type() -> None:
    """Otherwise it is of another protocol version, and its entries are refused by the decoder."""
    reached = set()
    for line in (CORPUS / "codec.hex").read_text().split():
        with contextlib.suppress(RemoteProtocolError):
            reached.add(type(decode(bytes.fromhex(line))))
    assert {kind.__name__ for kind in set(MESSAGES) - reached} == set()


@pytest.mark.parametrize("seed", range(20))
def test_seed_inputs_consist_of_decodable_messages(seed: int) -> None:
    """The seeds of the core target are not refused by the decoder."""
    messages = fuzz_targets.parse_conversation(fuzz_targets.conversation(seed))
    assert len(messages) >= 5
    for _, encoded in messages:
        fuzz_targets.codec(encoded)
        decode(encoded)
