// The page of a folder of runs: a row for each run, the newest first, and a link to its page. It asks again every 3 s.
"use strict";

const POLL_MS = 3000, SHOWN = 1000;
const STATES = ["running", "complete", "stopped", "failed"];
const list = { version: "", folder: "", runs: [], others: 0, offset_s: 0 };

/** How long ago a run was started: 12 min, 3 h, 5 d. */
function age(seconds) {
  if (seconds < 90) return `${Math.max(Math.round(seconds), 0)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} d ago`;
}

function progress({ done, steps }) {
  const bar = el("progress", { max: 1, value: steps ? Math.min(done / steps, 1) : 0, "aria-hidden": "true" });
  return el("div", {}, `${done.toLocaleString("en")} of ${steps ? steps.toLocaleString("en") : "?"}`, bar);
}

function line(run, now) {
  const cell = (label, attributes, ...children) => el("td", { "data-label": label, ...attributes }, ...children);
  const started = new Date(1000 * run.started_unix_s);
  return el("tr", {},
    cell("", { class: "name" }, el("a", { href: `run/${encodeURIComponent(run.name)}/` }, run.name), run.recipe ? el("small", {}, ` ${visible(run.recipe, 60)}`) : null),
    cell("", {}, el("span", { class: `pill ${run.state}` }, run.state), run.reason ? el("small", { title: visible(run.reason, 500) }, visible(run.reason, 90)) : null),
    cell("steps", {}, progress(run)),
    cell("reward", { class: "n" }, number(run.reward)),
    cell("samples/s", { class: "n" }, number(run.samples_per_s)),
    cell("started", { class: "n" }, el("time", { datetime: started.toISOString(), title: started.toLocaleString() }, age(now - run.started_unix_s))));
}

function draw() {
  const form = new FormData($("#filter")), text = form.get("text").trim().toLowerCase(), now = Date.now() / 1000 + list.offset_s;
  const kept = list.runs.filter((run) => (!form.get("state") || run.state === form.get("state")) && `${run.name} ${run.recipe}`.toLowerCase().includes(text));
  $("#folder").replaceChildren(visible(list.folder, 200));
  document.title = `${visible(list.folder, 80)} · flowrt`;
  const counts = STATES.map((state) => [state, list.runs.filter((run) => run.state === state).length]);
  $("#counts").replaceChildren(...counts.map(([state, count]) => el("div", {}, el("dt", {}, state), el("dd", {}, count.toLocaleString("en")))));
  const older = list.others ? ` ${list.others.toLocaleString("en")} older runs are not listed.` : "";
  $("#note").replaceChildren(kept.length === list.runs.length ? older.trim() : `${kept.length} of ${list.runs.length} runs.${older}`);
  $(".runs tbody").replaceChildren(...kept.slice(0, SHOWN).map((run) => line(run, now)));
}

function state(text, kind) {
  $("#state").className = `pill ${kind}`;
  $("#state").replaceChildren(text);
}

async function poll() {
  try {
    if (!document.hidden || !list.version) {
      const answer = await fetch(`api/runs?known=${list.version}`);
      if (!answer.ok) throw new Error((await answer.text()).trim());
      const found = await answer.json();
      list.offset_s = found.now_unix_s - Date.now() / 1000;
      Object.assign(list, found);
      const count = list.runs.length + list.others;
      state(count === 1 ? "1 run" : `${count.toLocaleString("en")} runs`, "live");
      draw();
    }
  } catch { state("connection lost", "lost"); }
  setTimeout(poll, POLL_MS);
}

$("#filter").addEventListener("input", draw);
$("#filter").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
poll();
