"""Prometheus: the scrape configuration of the documents, and counters over a resume, read as Prometheus reads them."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import wait_until
from tests.integration.test_watch import Watch
from tests.unit.observability.exporters.written_run import metrics, shares, write_lines, write_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "prometheus.yml"
LIMIT_S = 60.0


def scrape(configuration: Path) -> dict[str, Any]:
    """The families that the only target of a configuration answers with, by name, as Prometheus would request them.

    Raises urllib.error.HTTPError for a refused request.
    """
    [job] = yaml.safe_load(configuration.read_text())["scrape_configs"]
    [target] = [endpoint for of in job["static_configs"] for endpoint in of["targets"]]
    token = (configuration.parent / job["authorization"]["credentials_file"]).read_text().strip()
    address = f"http://{target}{job.get('metrics_path', '/metrics')}"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families)
    return {family.name: family for family in families}


def configured(run_dir: Path, address: str) -> Path:
    """The example for a run whose page has this address."""
    path = run_dir.parent / "prometheus.yml"
    target = address.removeprefix("http://").partition("/")[0]
    path.write_text(EXAMPLE.read_text().replace("RUN", run_dir.name).replace("127.0.0.1:8265", target))
    return path


def scraped(configuration: Path, step: int, steps: int) -> float:
    """The seconds at the gate when the last step is ``step``; asserts that they are those of this many steps."""
    families: dict[str, Any] = {}

    def is_read() -> bool:
        families.update(scrape(configuration))
        last = families["flowrt_step"].samples[0].value
        return bool(last == step and seconds() == pytest.approx(0.6 * steps))

    def seconds() -> float:
        samples = families["flowrt_worker_seconds"].samples if "flowrt_worker_seconds" in families else ()
        return float(sum(sample.value for sample in samples if sample.labels == {"role": "rollout", "cause": "gate"}))

    wait_until(is_read, LIMIT_S, lambda: f"the last scrape has {seconds()} s at the gate")
    assert families["flowrt_worker_seconds"].type == "counter"
    return seconds()


def test_the_guide_shows_the_example() -> None:
    guide = (ROOT / "docs" / "guides" / "seeing.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(block) == yaml.safe_load(EXAMPLE.read_text())
    assert EXAMPLE.read_text().endswith(block)


def test_the_example_scrapes_a_run_and_its_counters_survive_a_resume(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 9)
    with Watch(run_dir) as address:
        configuration = configured(run_dir, address)
        before = scraped(configuration, step=8, steps=9)
        # Resumed from the checkpoint after step 5: metrics.jsonl is written again, attribution.jsonl is continued.
        write_lines(run_dir / "metrics.jsonl.new", [*metrics(range(6)), *metrics([6], seed=7)])
        (run_dir / "metrics.jsonl.new").rename(run_dir / "metrics.jsonl")
        with (run_dir / "attribution.jsonl").open("a") as file:
            file.write(json.dumps(*shares([6])) + "\n")
        assert scraped(configuration, step=6, steps=10) > before
    with Watch(run_dir) as address:
        scraped(configured(run_dir, address), step=6, steps=10)


def test_a_wrong_token_is_refused_with_a_sentence(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 1)
    with Watch(run_dir) as address:
        configuration = configured(run_dir, address)
        token = (run_dir / ".watch_token").read_text()
        (run_dir / ".watch_token").write_text("wrong")
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(configuration)
    assert refused.value.code == 401
    sentence = refused.value.read().decode()
    assert "Authorization" in sentence
    assert token not in sentence
