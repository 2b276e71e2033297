"""Coverage-guided fuzzing of the codec and of the controller's core, by atheris (``pip install atheris``).

python scripts/fuzz_guided.py codec -runs=1000000        libFuzzer's own options follow the target
python scripts/fuzz_guided.py core -max_total_time=600

Inputs that reach new code are kept in tests/corpus/TARGET.hex, one a line, and run again by the tests. A finding is
written to the current directory as crash-….
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.simulation, which is not installed

with atheris.instrument_imports(include=["flowrt.protocol", "flowrt.net", "flowrt.controller"]):
    from flowrt.protocol.codec import encode
    from tests.simulation import fuzz_targets
    from tests.simulation.message_fuzzer import MessageFuzzer

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
SEEDS = 200
USAGE = "usage: python scripts/fuzz_guided.py codec|core [libFuzzer options]"


def seeds(target: str) -> list[bytes]:
    """Initial inputs that a fuzzer would take long to find: well-formed messages, or conversations of them."""
    if target == "core":
        return [fuzz_targets.conversation(seed) for seed in range(SEEDS)]
    return [encode(MessageFuzzer(seed).message()) for seed in range(SEEDS)]


def main() -> int:
    """Fuzz in a child process, because libFuzzer ends its process; then write the corpus. Returns the exit code."""
    target, *options = sys.argv[1:] or [""]
    if target not in ("codec", "core"):
        sys.exit(USAGE)
    path = CORPUS / f"{target}.hex"
    known = [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []
    with tempfile.TemporaryDirectory() as name:
        kept, begun = Path(name) / "kept", Path(name) / "begun"
        for folder, inputs in ((kept, known), (begun, seeds(target))):
            folder.mkdir()
            for number, data in enumerate(inputs):
                (folder / str(number)).write_bytes(data)
        ended = subprocess.run([sys.executable, __file__, "--here", target, kept, begun, *options], check=False)
        # libFuzzer keeps an initial input only if it changed it, so one message of each kind is added unchanged.
        whole = {data[:2]: data for data in seeds(target)} if target == "codec" else {}
        contents = {path.read_bytes() for path in kept.iterdir()} | set(whole.values())
        inputs = sorted(contents, key=lambda data: (len(data), data))
    CORPUS.mkdir(exist_ok=True)
    path.write_text("".join(f"{data.hex()}\n" for data in inputs if data))
    return ended.returncode


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        atheris.Setup([sys.argv[0], "-max_len=1024", *sys.argv[3:]], getattr(fuzz_targets, sys.argv[2]))
        atheris.Fuzz()
    sys.exit(main())
