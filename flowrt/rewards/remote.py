"""Reward functions that are requests: ``http:URL``, and ``judge``, a language model behind /v1/chat/completions.

| function | sends | expects |
|---|---|---|
| http | ``{"prompt", "completion", "answer", "row"}`` | ``{"reward": x}``: a number, null, or named numbers |
| judge | one message with role user, temperature 0 | text; the reward is the last match of ``reward.judge.pattern`` |

A request is repeated, up to ``reward.retries`` times, if the server answers 429 or 5xx or the connection fails. The
pause before it is random, below a bound that doubles each time ("full jitter"). Answers are stored in a file by the
SHA-256 of the request, so that a resumed run gives the same sample the same reward. The API key is in no file, message
or log.
"""

import asyncio
import hashlib
import json
import logging
import os
import random
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flowrt.errors import ConfigError, WaitExpired
from flowrt.rewards.call_forms import Rate
from flowrt.rewards.options import JudgeOptions, RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.reward_names import KEY_FIX, RewardFunction
from flowrt.rewards.rows import decode_row, json_text
from flowrt.rewards.user_file import ANSWER, as_text, no_column, outcome_of
from flowrt.runtime.addresses import check_url
from flowrt.runtime.user_module import cut
from flowrt.runtime.waits import BoundedElsewhere, pause, wait_until

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
MAX_ANSWER_BYTES = 1 << 20
TOO_MANY = 429
SERVER_ERROR = 500
CHAT = "/v1/chat/completions"
PLACES = re.compile(r"\{(prompt|answer|response)\}")
LOCK_S = 5.0
"""Seconds to wait for another reward worker that has locked the file of answers."""
OTHERS = BoundedElsewhere("the deadlines of other requests")


class _Passing(Exception):
    """A failure that may be transient."""


class RemoteRewards:
    """Makes requests for rewards, at most ``reward.concurrency`` at a time."""

    def __init__(
        self, functions: Sequence[RewardFunction], options: RewardOptions, cache: Path | None, rate: Rate | None = None
    ) -> None:
        """Set up; no connection is made yet. Raises ConfigError if the API key is not set.

        Args:
            functions: the functions, all of which are requests.
            options: options of the requests.
            cache: file of answers; None: answers are kept in memory only.
            rate: limit on the rate of requests; None: that of the options.
        """
        self._rate = Rate(options.rate_per_s) if rate is None else rate
        check_key(options)
        self._options = options
        self._key = os.environ.get(options.key_variable, "") if options.key_variable else ""
        self._urls = {function.name: _url(function, options) for function in functions}
        self._pattern = re.compile(options.judge.pattern)
        self._room = asyncio.Semaphore(options.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._answers = Answers(cache)
        self._asked: dict[str, asyncio.Task[RewardOutcome]] = {}
        """Requests in progress by their digest; equal requests are made once."""

    async def call(self, function: RewardFunction, response: str, row: bytes) -> RewardOutcome:
        """The outcome of a request, or of an earlier one that was equal.

        ``row`` is JSON of the row's columns, with the answer.
        """
        columns = decode_row(row)
        if function.kind == "judge" and "{answer}" in self._options.judge.prompt:
            if ANSWER not in columns:
                what = f"reward.judge.prompt has {{answer}}, and {no_column(ANSWER, columns)}"
                return RewardOutcome(Result.INVALID, detail=what)
            if columns[ANSWER] is None:
                return RewardOutcome(Result.NOT_APPLICABLE)
        body = self._judge_body(response, columns) if function.kind == "judge" else _http_body(response, columns)
        text = json_text(body, sort_keys=True)
        digest = hashlib.sha256(f"{self._urls[function.name]}\0{self._options.judge.pattern}\0{text}".encode())
        key = digest.hexdigest()
        if (known := self._answers.get(key)) is not None:
            return outcome_of(known["reward"], 0)
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._ask(function, text, key))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
        return await wait_until(asyncio.shield(self._asked[key]), OTHERS, "a reward", self._urls[function.name])

    async def close(self) -> None:
        """Cancel open requests, and close the connections and the file."""
        for task in list(self._asked.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()
        self._answers.close()

    async def _ask(self, function: RewardFunction, text: str, key: str) -> RewardOutcome:
        begin_s = monotonic()
        url, options = self._urls[function.name], self._options
        attempt = 0
        while True:
            try:
                await wait_until(self._room.acquire(), OTHERS, "room for a request", "other requests")
                try:
                    if delay_s := self._rate.take():
                        await pause(delay_s)
                    answer = await wait_until(self._post(url, text), options.timeout_s, "a reward", url)
                finally:
                    self._room.release()
                break
            except _Passing as failure:
                if attempt == options.retries:
                    return _failed(Result.HTTP, f"{url} {failure}", begin_s)
            except WaitExpired:
                return _failed(Result.TIMEOUT, f"{url} did not answer in {options.timeout_s:g} s", begin_s)
            except ValueError as wrong:
                return _failed(Result.HTTP, f"{url} {wrong}", begin_s)
            await pause(random.uniform(0.0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)))
            attempt += 1
        reward, wrong_answer = self._read(function, answer)
        if wrong_answer:
            return _failed(Result.INVALID, f"{url} {wrong_answer}", begin_s)
        outcome = outcome_of(reward, 0)
        if outcome.is_failure:
            return _failed(Result.INVALID, f"{url} gave a reward that is none: {outcome.detail}", begin_s)
        self._answers.put(key, {"reward": reward})
        return outcome

    async def _post(self, url: str, text: str) -> object:
        """The JSON of an answer. Raises _Passing for a transient failure, ValueError for any other."""
        import aiohttp  # slow: only processes that make requests import it

        self._session = self._session or aiohttp.ClientSession(
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        )
        try:
            sent = text.encode(errors="replace")
            async with self._session.post(url, data=sent, allow_redirects=False, proxy=proxy_of(url)) as reply:
                data = await reply.content.read(MAX_ANSWER_BYTES)
                while not reply.content.at_eof() and len(data) < MAX_ANSWER_BYTES:
                    data += await reply.content.read(MAX_ANSWER_BYTES - len(data))
                status = reply.status
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"cannot be reached: {cut(str(error)) or type(error).__name__}") from None
        if status == TOO_MANY or status >= SERVER_ERROR:
            raise _Passing(f"answered with status {status}")
        if status != 200:
            raise ValueError(f"answered with status {status}: {cut(data.decode(errors='replace'))}")
        try:
            return json.loads(data)
        except ValueError:
            raise ValueError(f"gave no JSON: {cut(data.decode(errors='replace'))!r}") from None

    def _read(self, function: RewardFunction, answer: object) -> tuple[object, str]:
        """The reward in an answer, and what is wrong with the answer; empty if nothing is wrong."""
        if function.kind == "http":
            if not isinstance(answer, Mapping) or "reward" not in answer:
                return None, f"gave no reward: {cut(json.dumps(answer))}"
            return answer["reward"], ""
        try:
            text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None, f"gave no message: {cut(json.dumps(answer))}"
        matches = list(self._pattern.finditer(text if isinstance(text, str) else ""))
        try:
            return float(matches[-1][min(self._pattern.groups, 1)]), ""
        except (IndexError, ValueError, TypeError):
            return None, f"gave no number by reward.judge.pattern: {cut(str(text))!r}"

    def _judge_body(self, response: str, columns: Mapping[str, object]) -> dict[str, object]:
        judge = self._options.judge
        values = {
            "prompt": _conversation(columns.get("prompt")),
            "answer": as_text(columns.get("answer")),
            "response": response,
        }
        content = PLACES.sub(lambda place: values[place[1]], judge.prompt)
        messages = [{"role": "user", "content": content}]
        return {"model": judge.model, "messages": messages, "temperature": 0, "max_tokens": judge.max_tokens}


class Answers:
    """Answers by the digest of their request, in a file that several reward workers share."""

    def __init__(self, path: Path | None) -> None:
        """Open the file; None, or a file that cannot be used, which is logged: answers are kept in memory."""
        self._open(":memory:" if path is None else str(path))

    def _open(self, path: str) -> None:
        try:
            self._db = sqlite3.connect(path, timeout=LOCK_S, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except sqlite3.Error as error:
            self._fail(path, error)

    def _fail(self, path: str, error: sqlite3.Error) -> None:
        log.warning("answers of judges are not kept: %s cannot be used: %s", path, error)
        self._open(":memory:")

    def get(self, key: str) -> Mapping[str, object] | None:
        """The stored answer of a request; None if there is none that can be read."""
        try:
            row = self._db.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
            answered = json.loads(row[0]) if row else None
            return answered if isinstance(answered, dict) and "reward" in answered else None
        except (sqlite3.Error, ValueError):
            return None

    def put(self, key: str, answer: Mapping[str, object]) -> None:
        """Store an answer; if the file fails, answers are kept in memory from then on."""
        try:
            self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))
        except sqlite3.Error as error:
            self._fail("the file", error)

    def close(self) -> None:
        self._db.close()


def judge_mistakes(judge: JudgeOptions) -> Iterator[str]:
    """Options with which a judge cannot be asked. Raises ConfigError for a wrong address."""
    for name in ("url", "model"):
        if not getattr(judge, name):
            yield f"reward function judge needs reward.judge.{name}; set it"
    if "{response}" not in judge.prompt:
        yield "reward.judge.prompt has no {response} in it: every response would have the same reward"
    try:
        re.compile(judge.pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield f"reward.judge.pattern is {judge.pattern!r}, which is wrong: {error}; correct it"
    if judge.url:
        check_url("reward.judge.url", judge.url, KEY_FIX)


def check_key(options: RewardOptions) -> None:
    """Raise ConfigError if ``reward.key_variable`` names an environment variable that is not set."""
    if options.key_variable and not os.environ.get(options.key_variable):
        raise ConfigError(f"reward.key_variable is {options.key_variable!r}, which is not set; export it")


def proxy_of(url: str) -> str | None:
    """The proxy of the environment for an address (http_proxy, https_proxy, all_proxy, no_proxy); None: none."""
    from urllib.request import getproxies, proxy_bypass  # an HTTP client, which most processes do not need

    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _url(function: RewardFunction, options: RewardOptions) -> str:
    if function.kind == "http":
        return function.argument
    url = options.judge.url.rstrip("/")
    return url if url.endswith(CHAT) else url.removesuffix("/v1") + CHAT


def _http_body(response: str, columns: Mapping[str, object]) -> dict[str, object]:
    return {
        "prompt": columns.get("prompt"),
        "completion": response,
        "answer": columns.get("answer"),
        "row": {name: value for name, value in columns.items() if name not in ("prompt", "answer")},
    }


def _conversation(prompt: object) -> str:
    """A prompt as text; messages follow one another, each with its role."""
    if isinstance(prompt, list):
        return "\n\n".join(
            f"{message.get('role')}: {_content(message)}" for message in prompt if isinstance(message, Mapping)
        )
    return as_text(prompt)


def _content(message: Mapping[str, object]) -> str:
    """The content of a message, and its calls of tools as JSON."""
    parts = [message.get("content"), message.get("tool_calls")]
    return "\n".join(as_text(part) for part in parts if part not in (None, "", []))


def _failed(result: Result, detail: str, begin_s: float) -> RewardOutcome:
    return RewardOutcome(result, detail=detail, seconds=monotonic() - begin_s)
