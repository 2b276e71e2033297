"""A real SGLang server as a judge: it is killed while it judges, and cached scores are not requested again."""

import asyncio
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from flowrt.engines.hf import save_model
from flowrt.engines.server.process import free_port
from flowrt.engines.sglang.server_process import CPU_ARGUMENTS
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.rewards.options import JudgeOptions, RewardOptions
from flowrt.rewards.outcomes import Result
from flowrt.rewards.scoring import RewardScorer
from flowrt.runtime.process_sessions import KILL_TIMEOUT_S, kill_session
from flowrt.tasks import character_tokenizer

from .conftest import NOT_HERE, PYTHON, START_S

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.skipif(not PYTHON.exists(), reason=NOT_HERE),
]
RESPONSES = [str(number) for number in range(100, 124)]
KEY = "the-key-of-the-judge"
POLL_S = 0.5
ROW = b'{"answer": "1"}'


class Judge:
    """A server process on a port of its own; a model of random weights that answers with digits."""

    def __init__(self, directory: Path) -> None:
        self._model = directory / "model"
        tokenizer = wrap_tokenizer(character_tokenizer("0123456789"))
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        shape = {"hidden_size": 64, "layers": 2, "heads": 2, "intermediate_size": 128, "max_length": 512}
        save_model(build_model(vocab_size=len(tokenizer), seed=1, **shape).eval(), tokenizer, self._model)
        self._log = directory / "judge.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; returns before it is ready."""
        command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(self._model), "--device", "cpu"]
        command += [*CPU_ARGUMENTS, "--dtype", "float32", "--max-total-tokens", "8192", *self._arguments]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def ready(self) -> None:
        """Wait until the server answers."""
        end_s = monotonic() + START_S
        request = urllib.request.Request(f"{self.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        while True:
            try:
                await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=5.0).close())
            except (urllib.error.URLError, OSError):
                assert self._process is not None
                assert self._process.poll() is None, self._log.read_text()[-3000:]
                assert monotonic() < end_s, f"no answer after {START_S:.0f} s: {self._log.read_text()[-3000:]}"
                await asyncio.sleep(POLL_S)  # the server is another process
            else:
                return

    def kill(self) -> None:
        """Kill all its processes, and remove their shared memory."""
        if self._process is None:
            return
        kill_session(self._process.pid)
        self._process.wait(KILL_TIMEOUT_S)
        self._process = None


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    server = Judge(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_a_killed_judge_loses_no_reward_and_scores_are_not_requested_twice(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge_options = JudgeOptions(url=judge.url, model="judge", prompt="{response}", pattern=r"(\d)", max_tokens=100)
    options = RewardOptions(
        functions=("judge",),
        judge=judge_options,
        retries=100,
        timeout_s=START_S,
        concurrency=4,
        key_variable="JUDGE_KEY",
    )
    await judge.ready()
    scorer = RewardScorer(options, cache=tmp_path / "judge.sqlite")
    scoring = [asyncio.ensure_future(scorer.outcomes(response, ROW)) for response in RESPONSES]
    await asyncio.wait(scoring, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    judge.kill()
    assert not all(task.done() for task in scoring), "some responses are not judged yet"
    judge.start()
    first = [outcome for [outcome] in await asyncio.wait_for(asyncio.gather(*scoring), START_S)]
    await scorer.close()
    assert [outcome.result for outcome in first] == [Result.OK] * len(RESPONSES), {outcome.detail for outcome in first}
    judge.kill()
    again = RewardScorer(options, cache=tmp_path / "judge.sqlite")
    second = [outcome for [outcome] in [await again.outcomes(response, ROW) for response in RESPONSES]]
    await again.close()
    assert [outcome.value for outcome in second] == [outcome.value for outcome in first]
