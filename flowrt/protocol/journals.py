"""Journals: what rollout workers have generated, on disk, for a run that is resumed or a worker that takes over.

A worker has a directory ``journals/ATTEMPT/WORKER`` in the run directory, ATTEMPT being the number of the start or
resume of the run, and in it a file for each of its processes (`flowrt.runtime.record_file`). A record is a part of a
sample: its tokens from one on, and their columns. The last part of a complete sample says so; the parts of a sample
that is not complete are a prefix of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import quote

from flowrt.protocol.messages import Int, Ints, ProtocolRecord

JOURNALS = "journals"
"""Directory of the journals in the run directory."""
SUFFIX = ".journal"
PARTIAL = f".*{SUFFIX}.part"
"""Pattern of the files that are left of a process that was killed while it rewrote its journal."""
KIND = b"flowrt journal 2\n"
"""Beginning of each file; its number is that of the format."""
Place = TypeVar("Place")


class SampleKey(NamedTuple):
    """The identity of a sample in a run and all its resumes."""

    epoch: int
    prompt: int
    member: int
    attempt: int


class SamplePart(ProtocolRecord):
    """Header of a record: tokens of a sample, whose columns are the body of the record, one after the other."""

    epoch: Int
    prompt: Int
    member: Int
    attempt: Int
    prompt_crc: Int  # CRC-32 of the tokens of the prompt
    start: Int  # number of the sample's tokens before this part
    count: Int  # number of its tokens in this part
    spans: Ints  # of all tokens up to the end of this part: version, tokens, version, tokens, ...
    is_complete: bool
    truncated: bool  # of a complete sample: cut at the length limit
    columns: tuple[tuple[str, str, Int], ...]  # name, dtype, and bytes of each column

    @property
    def key(self) -> SampleKey:
        """The sample."""
        return SampleKey(self.epoch, self.prompt, self.member, self.attempt)

    @property
    def tokens(self) -> int:
        """Number of the sample's tokens up to the end of this part."""
        return self.start + self.count

    @property
    def rank(self) -> tuple[bool, int]:
        """Of two samples of the same key that end with such parts, the one to be preferred has the larger rank."""
        return self.is_complete, self.tokens

    @property
    def oldest(self) -> int:
        """The oldest version that generated a token."""
        return min(self.spans[::2], default=0)

    @property
    def newest(self) -> int:
        """The newest version that generated a token."""
        return max(self.spans[::2], default=0)


@dataclass(slots=True)
class WrittenSample(Generic[Place]):
    """The parts of a sample in one file, without a gap, and the place of each."""

    parts: list[tuple[SamplePart, Place]]

    @property
    def last(self) -> SamplePart:
        """The last part, which has the spans of the sample."""
        return self.parts[-1][0]


def written_samples(parts: Iterable[tuple[SamplePart, Place]]) -> dict[SampleKey, WrittenSample[Place]]:
    """The samples of a file's parts, in the order in which they were written.

    A part that starts at token 0 begins its sample anew. After a gap, what was before it is kept.
    """
    samples: dict[SampleKey, WrittenSample[Place]] = {}
    for part, place in parts:
        before = samples.get(part.key)
        if part.start == 0:
            samples[part.key] = WrittenSample([(part, place)])
        elif before is not None and before.last.tokens == part.start and before.last.prompt_crc == part.prompt_crc:
            before.parts.append((part, place))
    return samples


def journals_of(attempt: int) -> str:
    """The directory of the journals of one start or resume of the run, relative to the run directory."""
    return f"{JOURNALS}/{attempt}"


def journal_of(journals: str, worker: str) -> str:
    """The directory of a worker's journal, relative to the run directory."""
    name = quote(worker, safe="")
    return f"{journals}/{name.replace('.', '%2E', 1) if name.startswith('.') else name}"


def number_of(path: Path) -> int:
    """The number of a journal among those of its worker, which grows with each process."""
    return int(path.stem) if path.stem.isdecimal() else 0


def attempts_of(run_dir: Path) -> dict[int, Path]:
    """The directories of journals by the number of the start or resume. Raises OSError if they cannot be read."""
    root = run_dir / JOURNALS
    if not root.is_dir():
        return {}
    return {int(path.name): path for path in sorted(root.iterdir()) if path.name.isdecimal() and path.is_dir()}
