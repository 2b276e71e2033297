"""The page in a real Chromium on a generated run: content, requests, hostile texts, and latency."""

import base64
import gzip
import json
import statistics
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from common.chromium import Browser, Tab
from common.drawn_run import DrawnRun, DrawnServer, document, serving
from seeing_parts.page import HOSTILE, MAX_PAINT_MS, MAX_REDRAW_MS, effects, hostile_strings, paints, redraws_ms

from flowrt.observability.page.single_file import page

pytestmark = [pytest.mark.chromium, pytest.mark.timeout(240)]

COMPLETE = "performance.getEntriesByName('complete').length"
CELLS = "[...document.querySelectorAll('#samples tbody td[data-c=%s]')].map((cell) => cell.innerText)"
"""Texts of a column of the table of samples or groups."""
NUMBERS = "[...document.querySelectorAll('#samples tbody td[data-c=%s]')].map((cell) => Number(cell.innerText))"
RED_LINES = """(() => {
  const plot = document.querySelector('#curves canvas'), c = plot.getContext('2d');
  const red = getComputedStyle(document.documentElement).getPropertyValue('--red').trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(red.slice(at, at + 2), 16));
  const { data, width } = c.getImageData(0, Math.floor(plot.height / 2), plot.width, 1);
  let found = 0;
  for (let x = 0; x < width; x++) {
    found += Math.abs(data[4 * x] - r) + Math.abs(data[4 * x + 1] - g) + Math.abs(data[4 * x + 2] - b) < 60;
  }
  return found;
})()"""
"""Pixels of the colour of faults in the middle row of the first curve."""


async def open_page(tab: Tab, server: DrawnServer) -> None:
    """Open the page and wait until all of its panels are drawn."""
    await tab.open(server.url)
    await tab.until(COMPLETE)


async def test_page_has_all_panels_no_error_and_no_foreign_request(tab: Tab) -> None:
    async with serving(DrawnRun()) as server:
        await open_page(tab, server)
        assert tab.problems == []
        assert {urlsplit(url).netloc for url in tab.requests} == {f"127.0.0.1:{server.port}"}
        assert await tab.evaluate("document.title") == "arithmetic-0042 · flowrt"
        text = await tab.evaluate("document.querySelector('main').innerText")
        for sentence in (
            "because of trainer (66 % of that)",
            "because of several (rollout-1 40 % of that)",
            "rollout-1 (rollout on host 'n2') is gone",
            "reward timeout",
        ):
            assert sentence in text
        assert await tab.evaluate("document.querySelectorAll('#curves > .grid > .card').length") == 15
        assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_fits_the_window_in_both_schemes(tab: Tab, width: int, height: int, scheme: str) -> None:
    async with serving(DrawnRun(state="live")) as server:
        await tab.emulate(width=width, height=height, scheme=scheme)
        await open_page(tab, server)
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        dark = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(18, 21, 26)") == (scheme == "dark")
        assert tab.problems == []


async def test_axis_shows_negative_rewards_and_labels_a_nonzero_origin(tab: Tab) -> None:
    async with serving(DrawnRun(low=-10, high=5)) as server:
        await open_page(tab, server)
        card = "[...charts.values()].find((chart) => chart.spec.title === 'Reward')"
        low, high = await tab.evaluate(f"(({{min, max}}) => [min, max])({card}.u.scales.y)")
        assert low < -9
        assert high > 2
        length = "[...charts.values()].find((chart) => chart.spec.title === 'Response length')"
        assert await tab.evaluate(f"{length}.u.scales.y.min") == 0
        await tab.evaluate(
            "document.querySelector('[name=y]').value = 'fit';"
            "document.querySelector('#view').dispatchEvent(new Event('change'))"
        )
        assert "axis from" in await tab.evaluate(f"{length}.card.innerText")


async def test_zoom_of_a_long_run_fetches_the_steps_of_its_window(tab: Tab) -> None:
    async with serving(DrawnRun(steps=10_000)) as server:
        await open_page(tab, server)
        points = await tab.evaluate("[run.steps.length, run.pairs]")
        assert points[0] <= 1_600
        assert points[1] == points[0] - 1
        reward = "[...charts.values()].find((chart) => chart.spec.title === 'Reward')"
        readout = f"{reward}.card.querySelector('.readout').innerText"
        assert "last, step 9999" in await tab.evaluate(readout)
        await tab.evaluate(f"{reward}.u.setCursor({{ left: 100, top: 20 }})")
        assert " to " in await tab.evaluate(readout)
        await tab.evaluate(f"{reward}.u.setCursor({{ left: -10, top: -10 }})")
        await tab.evaluate("zoom([4000, 4200])")
        await tab.until("view.fine && view.fine.steps.filter((step) => step >= 3950 && step <= 4250).length === 301")
        assert await tab.evaluate(f"{reward}.u.data[0].length") <= points[0] + 301
        assert "last, step 9999" in await tab.evaluate(readout)
        ascending = "view.fine.steps.every((step, i) => !i || step > view.fine.steps[i - 1])"
        assert await tab.evaluate(ascending)
        lengths = "Object.values(view.fine.columns).every((one) => one.length === view.fine.steps.length)"
        assert await tab.evaluate(lengths)
        evaluated = "view.fine.columns['eval/held_out/avg@4'].filter(known).length"
        assert await tab.evaluate(evaluated) == await tab.evaluate(evaluated.replace("view.fine", "run"))
        await tab.evaluate(f"{reward}.u.setCursor({{ left: {reward}.u.valToPos(4100, 'x'), top: 20 }})")
        assert (await tab.evaluate(readout)).startswith("step 4100")
        await choose_view(tab, "x", "wall_s")
        assert await tab.evaluate("view.fine") is None
        await tab.evaluate("zoom([1000, 1100])")
        inside = "view.fine.columns.wall_s.filter((s) => s >= 975 && s <= 1125)"
        exact = [s for s in server.run.series["wall_s"] if s is not None and 975 <= s <= 1125]
        await tab.until(f"view.fine && {inside}.length === {len(exact)}")
        await tab.evaluate("zoom(null)")
        assert await tab.evaluate(f"{reward}.u.data[0].length") == points[0]
        assert tab.problems == []


async def choose_view(tab: Tab, name: str, value: str) -> None:
    await tab.evaluate(
        f"document.querySelector('#view [name={name}]').value = '{value}';"
        "document.querySelector('#view').dispatchEvent(new Event('change'))"
    )


async def test_curves_of_other_runs_are_drawn_in_their_colours_with_a_legend(tab: Tab) -> None:
    hostile = "<b id=planted>other</b>"
    others = {"arithmetic-0041": DrawnRun(steps=400, seed=5), hostile: DrawnRun(steps=4_000, high=3.0)}
    async with serving(DrawnRun(steps=400, others=others)) as server:
        await open_page(tab, server)
        legend = await tab.evaluate("document.querySelector('#runs').innerText")
        assert legend.split() == ["arithmetic-0042", "arithmetic-0041", "(finished)", *hostile.split(), "(finished)"]
        assert not await tab.evaluate("Boolean(document.getElementById('planted'))")
        differing = await tab.evaluate("document.querySelector('#differences').innerText")
        assert "2 settings differ" in differing
        assert differing.split("seed")[1].split()[:3] == ["0", "5", "0"]
        reward = "[...charts.values()].find((chart) => chart.spec.title === 'Reward')"
        assert await tab.evaluate(f"{reward}.u.scales.x.max") >= 3_999
        assert await tab.evaluate(f"{reward}.u.scales.y.max") > 2.0
        for name, least in (("s0", 50), ("s1", 50), ("s2", 500)):
            assert await tab.evaluate(PIXELS % name) > least
        await tab.evaluate("zoom([1000, 1100])")
        inside = "view.fine.others.map((one) => one.steps.filter((step) => step >= 975 && step <= 1125).length)"
        await tab.until(f"view.fine && {inside}.join() === '0,151'")
        await choose_view(tab, "x", "wall_s")
        assert await tab.evaluate(f"{reward}.u.scales.x.max") >= others[hostile].end_s - 1
        readout = f"{reward}.card.querySelector('.readout')"
        assert await tab.evaluate(f"{readout}.querySelectorAll('b').length") == 4
        assert tab.problems == []


PIXELS = """(() => {
  const plot = document.querySelector('#curves canvas'), c = plot.getContext('2d');
  const ink = getComputedStyle(document.documentElement).getPropertyValue('--%s').trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(ink.slice(at, at + 2), 16));
  const { data } = c.getImageData(0, 0, plot.width, plot.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {
    found += Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 12;
  }
  return found;
})()"""
"""Pixels of a colour in the first curve."""


async def test_resources_are_drawn_by_role_with_the_worst_workers(tab: Tab) -> None:
    run = DrawnRun(steps=60, workers=20)
    async with serving(run) as server:
        await open_page(tab, server)
        await tab.evaluate("document.querySelector('#resources').scrollIntoView()")
        await tab.until("document.querySelectorAll('#resources .card canvas').length === 8")
        text = await tab.evaluate("document.querySelector('#resources').innerText")
        for label in (
            "At the end",
            "Tokens by device",
            "Device use",
            "Key-value cache in use",
            "Memory of the process",
        ):
            assert label in text
        table = await tab.evaluate("[...document.querySelectorAll('#resources .now tr')].map((row) => row.innerText)")
        rollout = next(row for row in table if row.startswith("rollout"))
        assert rollout.split()[1:3] == ["17", "17"]
        assert "GiB" in rollout
        assert "%" in rollout
        await tab.evaluate("document.querySelector('#resources summary').click()")
        assert "least device use" in await tab.evaluate("document.querySelector('#resources .worst').innerText")
        chart = "uses.charts.get('Device use')"
        await tab.evaluate("zoom([10, 20])")
        assert await tab.evaluate(f"{chart}.u.data[0].length") == 11
        assert "step 20" in await tab.evaluate(f"{chart}.readout.innerText")
        assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.problems == []


async def test_a_run_without_readable_resources_shows_the_reason(tab: Tab) -> None:
    run = DrawnRun(steps=20)
    lines = [
        {name: value for name, value in line.items() if name != "resources"}
        for line in run.answer("api/attribution", {})["lines"]
    ]
    run.instead = {"api/attribution": {"lines": lines}}
    async with serving(run) as server:
        await open_page(tab, server)
        await tab.evaluate("document.querySelector('#resources').scrollIntoView()")
        await tab.until("document.querySelector('#resources .now').innerText.includes('No resources')")
        lines[-1]["resources"] = {"roles": {"rollout": 3}}
        await open_page(tab, server)
        await tab.evaluate("document.querySelector('#resources').scrollIntoView()")
        await tab.until("document.querySelector('#resources').innerText.includes('The resources cannot be shown')")
        assert "at work" in await tab.evaluate("document.querySelector('#shares').innerText")
        assert tab.problems == []


async def test_slider_shows_the_controller_at_an_instant(tab: Tab) -> None:
    run = DrawnRun()
    async with serving(run) as server:
        await open_page(tab, server)
        assert not any("replay" in path for path in server.asked)
        slider = "document.querySelector('#timeline .slider input')"
        assert await tab.evaluate(f"Number({slider}.max)") == pytest.approx(run.end_s, abs=5)
        for at_s in (50.0, 100.5):
            await tab.evaluate(f"{slider}.value = {at_s}; {slider}.dispatchEvent(new Event('input'))")
        text = "document.querySelector('#timeline .opened').innerText"
        await tab.until(f"{text}.includes('Controller at 1:40 of the run')")
        assert [path for path in server.asked if "replay" in path] == ["/api/replay?at=100.500"]
        panel = await tab.evaluate(text)
        for label in ("Samples by stage", "generate", "Versions of the weights", "Who waited for whom", "blocked on"):
            assert label in panel
        run.instead = {"api/replay": {"reached_s": 70.0}}
        await tab.evaluate(f"{slider}.value = 90; {slider}.dispatchEvent(new Event('input'))")
        await tab.until(f"{text}.includes('The recording is replayed: 1:10 of 1:30.')")
        run.instead = {}
        await tab.until(f"{text}.includes('Controller at 1:30 of the run')")
        run.instead = {"api/replay": {**run.answer("api/replay", {"at": "60"}), "slots": {"<b id=planted>": {}}}}
        await tab.evaluate(f"{slider}.value = 60; {slider}.dispatchEvent(new Event('input'))")
        await tab.until(f"{text}.includes('<b id=planted>')")
        assert tab.problems == []


async def test_panels_without_data_show_the_reason(tab: Tab) -> None:
    run = DrawnRun(steps=20)
    run.series = {name: column for name, column in run.series.items() if not name.startswith(("eval/", "kl"))}
    about = run.answer("api/run", {})
    about["config"] |= {"eval": {"interval": 0}, "samples": {"per_step": 0}}
    about["files"] |= {"timeline": "missing", "attribution.jsonl": "its line 3 is damaged"}
    run.instead = {
        "api/run": about,
        "api/samples": {"samples": [], "total": 0},
        "api/groups": {"groups": [], "total": 0},
        "api/attribution": {"lines": []},
        "api/timeline": run.answer("api/timeline", {}) | {"lanes": [], "spans": [], "waits": []},
    }
    async with serving(run) as server:
        await open_page(tab, server)
        text = await tab.evaluate("document.body.innerText")
        for sentence in (
            "No evaluations: eval.interval is 0.",
            "No samples: samples.per_step is 0.",
            "No timeline: timeline is missing in the run directory.",
            "No attribution: attribution.jsonl: its line 3 is damaged.",
        ):
            assert sentence in text


async def test_sample_filters_select_the_matching_samples(tab: Tab) -> None:
    async with serving(DrawnRun()) as server:
        await open_page(tab, server)
        await choose(tab, "show", "samples")
        rewards = NUMBERS % "reward"
        for order, sign in (("worst", 1), ("best", -1)):
            await choose(tab, "order", order)
            await tab.until(f"(([first, ...more]) => more.every((one) => {sign} * (one - first) >= 0))({rewards})")
        await choose(tab, "reason", "timeout")
        ended = CELLS % "ended"
        await tab.until(f"{ended}.length && {ended}.every((one) => one.includes('timeout'))")
        await choose(tab, "reason", "")
        await choose(tab, "shortest", "20")
        await choose(tab, "longest", "30")
        tokens = NUMBERS % "tokens"
        await tab.until(f"{tokens}.length && {tokens}.every((one) => one >= 20 && one <= 30)")
        await tab.evaluate("document.querySelector('#samples [name=grep]').value = 'no sample says this'")
        await tab.evaluate("document.querySelector('#samples form').requestSubmit()")
        await tab.until("document.querySelector('#samples').innerText.includes('No sample is like that.')")
        assert tab.problems == []


async def test_prompt_counts_open_a_list_and_each_prompt_opens_its_samples(tab: Tab) -> None:
    hostile = "<b id=planted>reward</b>"
    run = DrawnRun()
    run.instead = {"api/ledger": {"states": {"trained": 480, "dropped": 7}, "dropped": {hostile: 7}}}
    async with serving(run) as server:
        await open_page(tab, server)
        listed = "[...document.querySelectorAll('#prompts .opened tr.open')]"
        await tab.evaluate("document.querySelectorAll('#prompts .counts table')[1].querySelector('button').click()")
        await tab.until(f"{listed}.length === 7")
        assert "1 to 7 of 7" in await tab.evaluate("document.querySelector('#prompts .opened').innerText")
        await tab.evaluate("document.querySelectorAll('#prompts .counts table')[0].querySelector('button').click()")
        await tab.until(f"{listed}.length === 50")
        await tab.evaluate(
            "[...document.querySelectorAll('#prompts .opened button')].find((one) => one.innerText === 'next').click()"
        )
        await tab.until(f"{listed}[0].innerText.startsWith('50')")
        await choose(tab, "reason", "timeout")
        await tab.evaluate(f"{listed}[3].click()")
        cells = CELLS % "prompt"
        await tab.until(f"{cells}.length === 8 && {cells}.every((one) => one === '53')")
        assert await tab.evaluate("document.querySelector('#samples [name=reason]').value") == ""
        await tab.until("document.querySelector('#prompts .opened').innerText.includes('Life of prompt 53')")
        assert "/api/samples?prompt=53&epoch=0&order=newest&limit=50&offset=0" in server.asked
        assert not await tab.evaluate("Boolean(document.getElementById('planted'))")
        assert tab.problems == []


async def choose(tab: Tab, name: str, value: str) -> None:
    await tab.evaluate(
        f"(() => {{ const choice = document.querySelector('#samples [name={name}]'); choice.value = '{value}';"
        "choice.dispatchEvent(new Event('change', { bubbles: true })); })()"
    )


async def test_opened_sample_shows_tokens_group_and_life(tab: Tab) -> None:
    async with serving(DrawnRun()) as server:
        await open_page(tab, server)
        await choose(tab, "show", "samples")
        await tab.until(f"({CELLS % 'completion'}).length")
        await tab.evaluate("document.querySelector('#samples tr.open').focus()")
        await press_enter(tab)
        await tab.until("document.querySelectorAll('#samples .group pre').length === 8")
        await tab.until("document.querySelector('#samples .opened').innerText.includes('Life of prompt')")
        tokens = "document.querySelectorAll('#samples .opened pre span')"
        assert await tab.evaluate(f"{tokens}.length") > 10
        assert await tab.evaluate(f"new Set([...{tokens}].map((one) => one.className)).size") >= 4
        await tab.evaluate(f"{tokens}[3].dispatchEvent(new Event('pointerover', {{ bubbles: true }}))")
        readout = await tab.evaluate("document.querySelector('#samples .opened p.readout').innerText")
        assert "of the trainer · version" in readout


async def press_enter(tab: Tab) -> None:
    for kind in ("keyDown", "keyUp"):
        await tab.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
        )


async def test_groups_are_sorted_by_their_heads_and_open_to_their_samples(tab: Tab) -> None:
    async with serving(DrawnRun()) as server:
        await open_page(tab, server)
        assert len(await tab.evaluate(CELLS % "reward")) == 50
        head = "document.querySelector('#samples th [data-by=reward]')"
        for sign, direction in ((-1, "descending"), (1, "ascending"), (-1, "descending")):
            await tab.evaluate(f"{head}.focus()")
            await press_enter(tab)
            await tab.until(f"{head}.closest('th').ariaSort === '{direction}'")
            rewards = await tab.evaluate(NUMBERS % "reward")
            assert rewards == sorted(rewards, reverse=sign < 0)
            assert await tab.evaluate(f"document.activeElement === {head}"), "the head keeps the focus"
        assert "/api/groups?order=-reward&limit=50&offset=0" in server.asked
        first = "document.querySelector('#samples tr.open')"
        size = await tab.evaluate(f"Number({first}.querySelector('[data-c=right]').innerText.split(' of ')[1])")
        await tab.evaluate(f"{first}.focus()")
        await press_enter(tab)
        inner = "#samples .members"
        advantages = NUMBERS.replace("#samples tbody", f"{inner} tbody") % "advantage"
        await tab.until(f"({advantages}).length === {size}")
        assert await tab.evaluate(f"{first}.ariaExpanded") == "true"
        await tab.evaluate(f"document.querySelector('{inner} th [data-by=advantage]').click()")
        await tab.until(f"document.querySelector('{inner} th [data-by=advantage]').closest('th').ariaSort !== 'none'")
        values = await tab.evaluate(advantages)
        assert len(set(values)) > 1
        assert values == sorted(values, reverse=True)
        await tab.evaluate(f"document.querySelector('{inner} tr.open').click()")
        await tab.until("document.querySelectorAll('#samples .group pre').length === 8")
        await tab.evaluate(f"{first}.click()")
        await tab.until(f"!document.querySelector('{inner}') && {first}.ariaExpanded === 'false'")
        assert tab.problems == []


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-10.0, 5.0), (0.0, 100.0), (0.5, 0.5)])
async def test_distributions_follow_the_filters(tab: Tab, low: float, high: float) -> None:
    run = DrawnRun(low=low, high=high, set_names=("sums", "<b id=planted>words</b>"))
    async with serving(run) as server:
        await open_page(tab, server)
        await tab.until("document.querySelectorAll('#samples .spread canvas').length === 3")
        text = await tab.evaluate("document.querySelector('#samples .spread').innerText")
        for part in ("Rewards", "Response lengths", "Reward by length", "By data set", "By solve rate", "cut off at"):
            assert part in text
        assert "<b id=planted>words</b>" in text
        assert not await tab.evaluate("Boolean(document.getElementById('planted'))")
        for name in ("s0", "s1"):
            assert await tab.evaluate(PIXELS.replace("#curves canvas", "#samples .spread canvas") % name) > 200
        counts = "document.querySelector('#samples .spread p.note').innerText"
        assert (await tab.evaluate(counts)).startswith("2,000 samples of steps 0 to 62; ")
        await choose(tab, "from", "10")
        await choose(tab, "to", "11")
        await tab.until(f"{counts}.startsWith('64 samples of steps 10 to 11; ')")
        assert "/api/distributions?from=10&to=11" in server.asked
        await choose(tab, "right", "2000")
        await tab.until("document.querySelector('#samples .spread').innerText.includes('a reward from 2,000 on')")
        assert tab.problems == []


async def test_kill_draws_a_red_line_and_the_page_reconnects_after_a_restart(tab: Tab) -> None:
    run = DrawnRun(state="live", steps=40)
    run.events = run.events[:2]
    async with serving(run) as server:
        await open_page(tab, server)
        await tab.until("live.opened")
        assert await tab.evaluate(RED_LINES) == 0
        line = run.add_event("gone", "rollout-0 (rollout on host 'n1') is gone: killed", 20, 50.0)
        server.push("event", line)
        await tab.until(RED_LINES, timeout_s=120)
        assert "is gone: killed" in await tab.evaluate("document.querySelector('#events tr.fault').innerText")

        await server.stop()
        await tab.until("document.querySelector('#state').innerText === 'connection lost'")
        longer = DrawnRun(state="live", steps=60)
        run.series, run.steps = longer.series, 60
        await server.start()
        await tab.until("run.steps.length === 60 && document.querySelector('#state').innerText === 'live'")

        server.push("rewound", {"step": 30})
        await tab.until("run.steps.length === 30 && run.old[0].steps[0] === 30")
        server.push("step", run.line(30))
        await tab.until("run.steps.length === 31 && run.columns.reward.length === 31")
        assert [problem for problem in tab.problems if "ERR_" not in problem] == []


async def test_ten_thousand_hostile_strings_have_no_effect(browser: Browser) -> None:
    assert len(HOSTILE) >= 20
    assert await effects(browser, hostile_strings(10_000)) == []


async def test_page_in_one_file_works_without_a_server(tab: Tab, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(page(document(DrawnRun(others={"arithmetic-0041": DrawnRun(seed=5)}))))
    await tab.open(file.as_uri())
    await tab.until(COMPLETE)
    assert tab.problems == []
    assert tab.requests == [file.as_uri()]
    assert await tab.evaluate("document.querySelectorAll('#curves > .grid > .card').length") == 15
    assert "arithmetic-0041 (finished)" in await tab.evaluate("document.querySelector('#runs').innerText")
    await choose(tab, "show", "samples")
    await choose(tab, "reason", "timeout")
    ended = CELLS % "ended"
    await tab.until(f"{ended}.length && {ended}.every((one) => one.includes('timeout'))")
    await tab.evaluate("document.querySelector('#samples tr.open').click()")
    await tab.until("document.querySelectorAll('#samples .opened pre span').length")
    await choose(tab, "reason", "")
    await choose(tab, "show", "groups")
    await tab.until(f"({CELLS % 'spread'}).length === 50")
    await tab.evaluate("document.querySelector('#samples th [data-by=spread]').click()")
    await tab.until("document.querySelector('#samples th [data-by=spread]').closest('th').ariaSort === 'descending'")
    spreads = await tab.evaluate(NUMBERS % "spread")
    assert spreads == sorted(spreads, reverse=True)
    assert await tab.evaluate("document.querySelectorAll('#samples .spread canvas').length") == 3
    await choose(tab, "from", "3")
    await tab.until("document.querySelector('#samples .spread').innerText.includes('leave the filters empty')")
    assert await tab.evaluate("document.title") == "arithmetic-0042 · flowrt"


async def test_first_paint_and_redraw_at_4096_workers_and_10000_steps(browser: Browser) -> None:
    run = DrawnRun(workers=4096, steps=10_000)
    # CPU time of the page's thread: other processes do not count in it.
    assert min(cpu for _, cpu in await paints(browser, run, 5)) <= MAX_PAINT_MS
    assert statistics.median(await redraws_ms(browser, run)) <= MAX_REDRAW_MS


def test_page_in_one_file_embeds_its_data_as_packed_json() -> None:
    text = page(document(DrawnRun(steps=20, texts=HOSTILE[:20])))
    packed = text.split('id="data" type="application/octet-stream">')[1].split("</script>")[0]
    assert json.loads(gzip.decompress(base64.b64decode(packed)))["api/run"]["steps"] == 20
