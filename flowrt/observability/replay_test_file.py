"""A recording as a test: a file for pytest that replays it and checks the state at one event."""

import base64
import json
import textwrap
from pathlib import Path
from pprint import pformat

from flowrt.controller.storage.recording_format import DIRECTORY
from flowrt.observability.replay import Replay

MAX_EMBEDDED_BYTES = 256 * 1024
"""Maximum size of a recording that is embedded in the test; a larger one is named by its path."""
ASSERTED = ("step", "live_groups", "latest_version", "workers", "dropped", "ended", "waits", "leases")
_LINE = 110
_TEST = '''"""State of {run} at {at_s:.6g} s, replayed from its recording. Written by `flowrt replay --as-test`."""

{imports}

from flowrt.observability.recordings import Recordings
from flowrt.observability.replay import Replay, replay_to

TERM, EVENT = {term}, {event}
{source}
EXPECTED = {expected}


def test_the_recorded_events_lead_to_this_state({argument}) -> None:
{prepare}    # With changed sources the replay goes on, and the assertions say what has changed.
    replay = Replay(Recordings.of({directory}).of_term(TERM), force=True)
    replay_to(replay, EVENT)
    assert replay.mismatch == ""
    status = json.loads(json.dumps(replay.status()))
    assert {{key: status[key] for key in EXPECTED}} == EXPECTED
'''
_PREPARE = """    (tmp_path / "{directory}").mkdir()
    for name, text in SEGMENTS.items():
        (tmp_path / "{directory}" / name).write_bytes(base64.b64decode(text))
"""


def test_file(run_dir: Path, replay: Replay) -> str:
    """The text of a test of the state that the replay has reached. A small recording is embedded in it."""
    paths = replay.recording.paths
    status = json.loads(json.dumps(replay.status()))
    is_embedded = sum(path.stat().st_size for path in paths) <= MAX_EMBEDDED_BYTES
    return _TEST.format(
        run=run_dir.absolute().name,
        at_s=replay.at_s,
        imports="\n".join(["import base64"] * is_embedded + ["import json", "from pathlib import Path"]),
        term=replay.recording.term,
        event=replay.events - 1,
        source=_embedded(paths) if is_embedded else f"RUN = Path({str(run_dir.absolute())!r})",
        expected=pformat({key: status[key] for key in ASSERTED}, width=_LINE, sort_dicts=False),
        argument="tmp_path: Path" if is_embedded else "",
        prepare=_PREPARE.format(directory=DIRECTORY) if is_embedded else "",
        directory="tmp_path" if is_embedded else "RUN",
    )


def _embedded(paths: list[Path]) -> str:
    items = []
    for path in paths:
        text = "\n".join(textwrap.wrap(base64.b64encode(path.read_bytes()).decode(), _LINE))
        items.append(f'    "{path.name}": """\n{text}\n""",\n')
    return f"SEGMENTS = {{\n{''.join(items)}}}"
