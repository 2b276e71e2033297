// The page of a run: one program for the server of `flowrt watch` and for run.html. Panels are functions, in the order of
// the page; that of the samples is in samples.js. Text of a run is shown by text nodes alone; styles are set through the CSSOM, as the security policy asks.
"use strict";

// ---------------------------------------------------------------- drawing

let colours = new Map();
/** The value of a colour of page.css in the present scheme. */
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888");
  return colours.get(name);
}

const FONT = "11px system-ui, 'DejaVu Sans', sans-serif";
/** What the axes of all charts have in common. */
const axis = { stroke: () => colour("soft"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: FONT };

function key(name) {
  const mark = el("span", { class: "key" });
  mark.style.background = `var(--${name}, #888)`;
  return mark;
}

/** A canvas in the size of its place; returns its context in CSS pixels. */
function context(canvas, height) {
  const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.font = FONT;
  return [c, width];
}

// ---------------------------------------------------------------- data

let embedded; // of run.html: the answers by path; null at a server

/** The answer to a path of the API: of the server, or of the document that the file carries. */
async function get(path) {
  if (embedded === undefined) embedded = await unpack();
  if (embedded) return lookUp(path);
  const answer = await fetch(path);
  if (answer.ok) return answer.json();
  const said = await answer.text();
  try { throw new Error(JSON.parse(said).error); } catch (error) { throw error instanceof SyntaxError ? new Error(said.trim()) : error; }
}

async function unpack() {
  const packed = document.getElementById("data");
  if (!packed) return null;
  const bytes = Uint8Array.from(atob(packed.textContent.trim()), (c) => c.charCodeAt(0));
  const text = new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  return text;
}

/** An answer of the embedded document; windows, samples and filters are cut out of what it has. */
function lookUp(path) {
  if (path in embedded) return embedded[path];
  const [name, query] = path.split("?");
  const like = Object.keys(embedded).filter((one) => one.split("?")[0] === name).map((one) => embedded[one]);
  const asked = new URLSearchParams(query);
  if (name === "api/timeline" && like.length) {
    const [t0, t1] = [Number(asked.get("t0")), Number(asked.get("t1"))];
    const inside = like.filter((one) => one.t0 <= t0 + 1e-6 && one.t1 >= t1 - 1e-6);
    const width = (one) => one.t1 - one.t0;
    return (inside.length ? inside : like).reduce((best, one) => ((inside.length ? width(one) < width(best) : width(one) > width(best)) ? one : best));
  }
  if (name === "api/samples") return samplesOfFile(like.flatMap((one) => one.samples), asked);
  if (name === "api/groups") return groupsOfFile(like.flatMap((one) => one.groups), asked);
  if (name === "api/distributions" && [...asked].length) throw new Error("This file has the distributions of all samples only: leave the filters empty, or open the run with flowrt watch.");
  if (name.startsWith("api/sample/")) {
    const found = lookUp("api/samples").samples.find((one) => `api/sample/${one.id}` === name);
    if (found) return { ...found, tokens: null };
  }
  if (like.length) return like[0];
  throw new Error("the file does not carry this; flowrt watch on the run directory has it");
}

const POINTS = 1600; // of a curve: two for each pixel column of a chart; page.html asks for the same ahead
// `pairs`: the number of points, from `first` on, that are the ends of buckets of steps, with extreme values.
const run = { info: null, steps: [], columns: {}, first: 0, pairs: 0, others: [], old: [], events: [], next: 0, attribution: [], status: null };
const view = { x: "step", y: "zero", smooth: 0, range: null, fine: null };
const config = (path) => path.split(".").reduce((at, part) => (at ? at[part] : undefined), run.info?.config);

/** Why a panel has nothing to show, in one sentence: a setting that is 0, or a file that is missing or damaged. */
function why(what, file, setting) {
  if (setting && config(setting) === 0) return `No ${what}: ${setting} is 0.`;
  const state = run.info?.files?.[file];
  if (state === "missing") return `No ${what}: ${file} is missing in the run directory.`;
  if (state && state !== "present") return `No ${what}: ${file}: ${state}.`;
  return `No ${what} yet.`;
}

/** Adds steps; those that are known already are replaced. */
function addSeries({ steps, columns, decimated }) {
  if (!steps.length) return;
  cutFrom(steps[0]);
  const had = run.steps.length;
  if (decimated) run.pairs = steps.length - 1;
  run.steps.push(...steps);
  for (const name of Object.keys(columns)) run.columns[name] ??= new Array(had).fill(null);
  for (const [name, column] of Object.entries(run.columns)) column.push(...(columns[name] || new Array(steps.length).fill(null)));
}

/** The curves as they are drawn: of the whole run, or with more steps in a zoomed window. */
const drawn = () => view.fine || run;

/** The curves of a run with those of a window in their place. */
function inserted(whole, part, low, high) {
  const x = xs(whole), before = x.filter((one) => one < low).length, after = x.length - x.filter((one) => one > high).length;
  const joined = (all, own) => [...all.slice(0, before), ...own, ...all.slice(after)], none = (n) => new Array(n).fill(null);
  const names = new Set([...Object.keys(whole.columns), ...Object.keys(part.columns)]);
  const columns = Object.fromEntries([...names].map((name) => [name, joined(whole.columns[name] || none(x.length), part.columns[name] || none(part.steps.length))]));
  return { ...whole, steps: joined(whole.steps, part.steps), columns, first: before, pairs: part.pairs };
}

/** The curves of other runs, as `run` has its own: all of them, or of a window. */
async function comparison(window) {
  if (!run.info.compared?.length) return [];
  const { runs } = await get(`api/compared?${window}&points=${POINTS}`);
  for (const one of runs) {
    one.first = 0;
    one.pairs = one.decimated ? one.steps.length - 1 : 0;
  }
  return runs;
}

async function compare() {
  try { run.others = await comparison("x=step"); } catch (error) { return $("#runs").replaceChildren(visible(error.message)); }
  if (!run.others.length) return;
  const is = $("#curves").classList, isFirst = !is.contains("compared");
  is.add("compared");
  const entry = (name, state, i) => el("span", {}, key(`s${i}`), visible(name, 120), state ? ` (${state})` : "");
  $("#runs").replaceChildren(entry(run.info.name, "", 0), ...run.others.map((one, i) => entry(one.name, one.state, i + 1)));
  if (isFirst) for (const chart of charts.values()) chart.rebuild();
  curves();
  if (!embedded && run.others.some((one) => one.state === "live")) later("compare", compare, 10000);
}

/** Fetches the steps of the zoomed window, if not all of them are there. */
async function refine() {
  const range = view.range;
  if (!range || embedded || ![run, ...run.others].some((one) => one.pairs)) return;
  const width = range[1] - range[0], [low, high] = [Math.max(range[0] - width / 4, 0), range[1] + width / 4];
  const window = `x=${view.x}&from=${low.toFixed(3)}&to=${high.toFixed(3)}`;
  try {
    const [own, others] = await Promise.all([get(`api/series?${window}&points=${POINTS}`), comparison(window)]);
    if (view.range !== range) return;
    own.pairs = own.decimated ? own.steps.length - 1 : 0;
    view.fine = { ...inserted(run, own, low, high), low, high, others: others.map((one, i) => inserted(run.others[i], one, low, high)) };
    redraw();
  } catch { /* the curves of the whole run stay */ }
}

/** Steps from `step` on are rolled back: they are kept to be drawn in grey. */
function dropFrom(step) {
  const cut = cutFrom(step);
  if (cut) run.old.push(cut);
  view.fine = null;
  later("refine", refine, 50);
}

function cutFrom(step) {
  const at = run.steps.findIndex((one) => one >= step);
  if (at < 0) return null;
  const columns = Object.fromEntries(Object.entries(run.columns).map(([name, column]) => [name, column.splice(at)]));
  run.pairs = Math.min(run.pairs, at);
  return { steps: run.steps.splice(at), columns };
}

/** An evaluation that ended after the last step is in the summary alone: it belongs to the weights of that step. */
function addLastEvaluations() {
  const last = run.steps.length - 1;
  for (const [name, { version, ...results }] of Object.entries(run.info.summary?.evaluations || {})) {
    if (last < 0 || version <= Math.max(-1, ...(run.columns[`eval/${name}/version`] || []).filter(known))) continue;
    for (const [result, value] of Object.entries(results)) (run.columns[`eval/${name}/${result}`] ??= new Array(last + 1).fill(null))[last] = value;
  }
}

function xs(of = drawn()) { return view.x === "step" ? of.steps : of.columns.wall_s || of.steps; }
function extent() {
  const x = xs(run);
  return view.range || (x.length ? [x[0], Math.max(x[x.length - 1], x[0] + 1e-3)] : [0, 1]);
}

/** The range of the charts: of all runs that are drawn, with some room. */
function padded() {
  let [low, high] = extent();
  for (const x of view.range ? [] : run.others.map(xs)) if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x.at(-1))];
  const room = view.range ? 0 : 0.012 * (high - low);
  return [low - room, high + room];
}

// ---------------------------------------------------------------- header

const ORDERLY = /completed its part|left in order/;
/** Whether an event is a fault: it is drawn and listed in red. */
function isFault(event) {
  return (event.kind === "gone" && !ORDERLY.test(event.text)) || event.kind === "version_lost" || (event.kind === "ended" && event.code > 0);
}
const MARKED = new Set(["resumed", "controller_restarted", "rolled_back", "restarted", "warning", "guard"]);
/** The colour of an event: red for faults, amber for warnings. */
const inkOf = (event) => (isFault(event) ? "red" : ["guard", "warning"].includes(event.kind) ? "amber" : "soft");

/** Header and alarms: where the run is, how fast, and whatever is wrong, before all else. */
function header() {
  const { info, status } = run, connection = live.lost, last = run.steps.length - 1;
  const at = (name) => run.columns[name]?.[last];
  const done = last < 0 ? 0 : run.steps[last] + 1, steps = status?.steps || info.steps || done;
  document.title = `${visible(info.name, 80)} · flowrt`;
  $("#name").replaceChildren(visible(info.name, 80));
  const state = connection || (info.state === "live" && status?.ended ? "finished" : info.state);
  const shown = state === "finished" ? info.outcome || state : state;
  $("#state").className = `pill ${connection ? "lost" : shown}`;
  $("#state").replaceChildren(visible(shown));
  $("#progress").value = steps ? done / steps : 0;
  const facts = [["recipe", info.recipe], ["step", `${done.toLocaleString("en")} of ${steps.toLocaleString("en")}`]];
  const recent = Math.max(last - 20, 0), walls = run.columns.wall_s || [];
  const pace = last > recent ? (walls[last] - walls[recent]) / (run.steps[last] - run.steps[recent]) : NaN;
  if (state === "live" && known(pace)) facts.push(["left", duration(pace * (steps - done))]);
  else if (last >= 0) facts.push(["took", duration(info.summary?.wall_s ?? walls[last])]);
  if (known(at("reward"))) facts.push(["reward", number(at("reward"))]);
  if (known(at("samples_per_s"))) facts.push(["samples/s", number(state === "live" ? at("samples_per_s") : info.summary?.samples_per_s ?? at("samples_per_s"))]);
  facts.push(["staleness", `${number(at("staleness_max"))} of ${number(info.staleness_bound)} allowed`]);
  if (state === "live" && status) facts.push(["workers", String(Object.keys(status.workers || {}).length + (status.others || status.graph?.others || 0))]);
  if (state !== "live" && info.summary?.reason) facts.push(["ended", info.summary.reason]);
  $("#facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
  const red = state === "live" && status ? alarms(status) : [];
  if (info.state === "killed") red.push("The run ended without a summary: its controller was killed, or the machine went down.");
  const mild = Object.entries(info.files || {}).filter(([, how]) => how !== "present" && how !== "missing").map(([name, how]) => `${name}: ${how}`);
  if (embedded?.left_out) mild.push(`This file leaves out: ${embedded.left_out}`);
  const texts = [...red.map((t) => [t, "alarm"]), ...mild.map((t) => [t, "alarm mild"])];
  const now = texts.map(([t]) => t).join("\n");
  if (header.shown !== now) $("#alarms").replaceChildren(...texts.slice(0, 12).map(([t, c]) => el("p", { class: c }, t)));
  header.shown = now;
}

function alarms(status) {
  const graph = status.graph || {}, waits = graph.waits || [];
  const nonfinite = status.latest?.nonfinite;
  return [
    ...(graph.deadlocks || []).map((names) => `Deadlock: ${names.join(", ")} wait only for each other.`),
    ...Object.entries(status.vacancies || {}).map(([role, [s, reason]]) => `No ${role} worker for ${duration(s)}: ${reason}`),
    ...Object.values(status.unjoined || {}),
    ...Object.entries(status.cut_off || {}).map(([who, s]) => `No network traffic from ${who} for ${duration(s)}: its link or its machine is down.`),
    ...waits.filter((w) => w.unsatisfiable).map((w) => `${w.who} waits for ${w.what}, and no worker can satisfy this.`),
    ...waits.filter((w) => w.overdue).map((w) => `${w.who} waits ${duration(w.age_s)} for ${w.what}, over its limit of ${duration(w.limit_s)}: blocked on ${w.blocked_on || "no worker"}.`),
    ...(status.guards?.firing || []),
    ...(nonfinite?.length ? [`Not finite in step ${status.latest.step}: ${nonfinite.join(", ")}`] : []),
  ];
}

// ---------------------------------------------------------------- curves

const CURVES = [
  { title: "Reward", lines: ["reward"], band: ["reward_p10", "reward_p90"], names: { reward: "mean" }, spread: "reward_std" },
  { title: "Evaluations", match: /^eval\/.+\/(avg@\d+|pass@(?!1$)\d+)$/, strip: /^eval\//, points: true, none: ["evaluations", "evaluations.jsonl", "eval.interval"] },
  { title: "Parts of the reward", match: /^reward\/.+/, strip: /^reward\// },
  { title: "Response length", unit: "tokens", lines: ["response_length", "length_max"], names: { response_length: "mean", length_max: "longest" } },
  { title: "Cut off at the limit", unit: "share", lines: ["truncated"], share: true },
  { title: "Groups without signal", unit: "share", lines: ["zero_variance_fraction"], share: true },
  { title: "KL to the reference", unit: "nats/token", lines: ["kl"], none: ["KL to the reference", "", "algorithm.kl.coef"] },
  { title: "Mismatch of rollout and trainer", unit: "nats/token", lines: ["mismatch_kl_k3"], names: { mismatch_kl_k3: "KL, estimator k3" } },
  { title: "Entropy", unit: "nats/token", lines: ["entropy", "nll"], names: { entropy: "exact", nll: "sampled" } },
  { title: "Staleness", unit: "versions", lines: ["staleness_mean", "staleness_max"], names: { staleness_mean: "mean", staleness_max: "largest" } },
  { title: "Gradient norm", lines: ["grad_norm"] },
  { title: "Loss", lines: ["loss"] },
  { title: "Learning rate", lines: ["lr"] },
  { title: "Samples per second", unit: "1/s", lines: ["samples_per_s"] },
  { title: "Trained tokens per second", unit: "1/s", lines: ["tokens_per_s"] },
];
const ELSEWHERE = /^(step|reward [-+] std|wall_s|eval\/|reward_p\d+|reward_std|length_mean|zero_variance_groups|samples$|groups$|tokens$|guard_)/;
const charts = new Map();
const near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    const chart = charts.get(target);
    if (!chart) continue;
    chart.seen = isIntersecting;
    if (isIntersecting && chart.stale) chart.draw();
  }
}, { rootMargin: "100px" });

/** All curves of the run, small and side by side; what is not recorded is said below them. */
function curves() {
  const recorded = ({ columns }) => Object.keys(columns).filter((name) => columns[name].some(known));
  const names = [...new Set([run, ...run.others].flatMap(recorded))];
  const used = new Set(), missing = [], [first, more] = document.querySelectorAll("#curves .grid");
  for (const spec of CURVES) {
    const lines = (spec.lines || names.filter((name) => spec.match.test(name)).sort()).filter((name) => names.includes(name)).slice(0, 6);
    for (const name of [...lines, ...(spec.band || [])]) used.add(name);
    if (lines.length) place(first, { ...spec, lines });
    else if (spec.none || spec.lines) missing.push(spec.none ? why(...spec.none) : `No ${spec.title.toLowerCase()}.`);
  }
  for (const name of names) if (!used.has(name) && !ELSEWHERE.test(name)) place(more, { title: name, lines: [name] });
  more.parentElement.hidden = !more.childElementCount;
  $("#curves .missing").replaceChildren(run.steps.length ? missing.join(" ") : "No curves yet: no step has ended.");
  for (const chart of charts.values()) if (!chart.seen) chart.stale = true;
  drawAll([...charts.values()].filter((chart) => chart.seen));
}

/** Draws charts; all sizes are read first, as reading one after a change of the page lays it out again. */
function drawAll(some) {
  for (const chart of some) if (!chart.u) chart.measure();
  for (const chart of some) chart.draw();
}

function place(grid, spec) {
  const made = [...charts.values()].find((chart) => chart.spec.title === spec.title);
  if (made && made.spec.lines.join() === spec.lines.join()) return;
  const card = el("div", { class: "card curve" });
  if (made) { near.unobserve(made.card); charts.delete(made.card); made.card.replaceWith(card); } else grid.append(card);
  charts.set(card, curve(card, spec));
  near.observe(card);
}

/** Exponential mean over the steps without the bias of its start; gaps stay gaps. */
function smoothed(values, steps, weight) {
  let sum = 0, mass = 0, before = steps[0] - 1;
  return values.map((value, i) => {
    if (!known(value)) return null;
    const kept = weight ** Math.max(steps[i] - before, 1);
    before = steps[i];
    sum = kept * sum + (1 - kept) * value;
    mass = kept * mass + 1 - kept;
    return sum / mass;
  });
}

const CURSOR = { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, points: { size: 5 } };
/** The axis of the steps or the clock. */
const stepAxis = () => ({ ...axis, size: 26, incrs: view.x === "step" ? COUNTS : TIMES, values: (u, at) => at.map((v) => (view.x === "step" ? v.toLocaleString("en") : clock(v))) });
/** Zooms all curves to a part that was chosen in one. */
function selected(u) {
  const { left, width } = u.select;
  if (width > 5) zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

/** One card with a plot: lines (raw, and smoothed if asked), a band, points with standard errors, marks of events. */
function curve(card, spec) {
  const readout = el("div", { class: "readout" }), plot = el("div", { class: "plot" });
  // Several runs: a colour for each run, a dash for each line. One run: a colour for each line.
  const several = () => run.others.length > 0, hue = (i) => `s${several() ? 0 : i % 6}`, ink = (i) => colour(hue(i));
  const dash = (i) => (several() ? DASHES[i % 6][0] : []);
  card.append(el("h3", {}, spec.title, spec.unit ? el("small", {}, `  ${spec.unit}`) : null), plot, readout);
  const label = (name) => spec.names?.[name] || (spec.strip ? name.replace(spec.strip, "") : spec.lines.length > 1 ? name : "");
  const isSmoothed = () => view.smooth && !spec.points;
  const chart = { spec, card, seen: false, stale: true, u: null };
  let size = null;

  function data() {
    const { steps, columns } = drawn(), column = (name) => columns[name] || new Array(steps.length).fill(null);
    const rows = [xs()];
    for (const name of spec.lines) rows.push(column(name), ...(isSmoothed() ? [smoothed(column(name), steps, view.smooth)] : []));
    for (const name of bands()) rows.push(column(name));
    return rows;
  }
  function bands() {
    if (spec.band?.every((name) => run.columns[name])) return spec.band;
    return spec.spread && run.columns[spec.spread] ? ["reward - std", "reward + std"] : [];
  }
  function range(u, low, high) {
    const [first, last] = padded();
    for (const other of drawn().others) for (const name of spec.lines) {
      const x = xs(other), y = other.columns[name] || [];
      for (let i = 0; i < x.length; i++) if (x[i] >= first && x[i] <= last && known(y[i])) [low, high] = [Math.min(low ?? y[i], y[i]), Math.max(high ?? y[i], y[i])];
    }
    if (!known(low)) return [0, 1];
    if (view.y === "zero") { low = Math.min(low, 0); high = Math.max(high, 0); }
    if (low === 0 && high === 0) return [0, 1];
    const room = (high - low) * (spec.points ? 0.15 : 0.06) || Math.abs(high) * 0.1 || 1;
    return [low === 0 && view.y === "zero" ? 0 : low - room, high === 0 && view.y === "zero" ? 0 : high + room];
  }
  function marks(u) {
    const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    ctx.strokeStyle = colour("old"); ctx.lineWidth = ratio;
    for (const { steps, columns } of run.old) {
      const x = view.x === "step" ? steps : columns.wall_s || [], y = columns[spec.lines[0]] || [];
      ctx.beginPath();
      for (let i = 0; i < x.length; i++) if (known(y[i])) ctx.lineTo(u.valToPos(x[i], "x", true), u.valToPos(y[i], "y", true));
      ctx.stroke();
    }
    drawn().others.forEach((other, k) => {
      const x = xs(other);
      ctx.strokeStyle = ctx.fillStyle = colour(`s${k + 1}`); ctx.lineWidth = 1.4 * ratio;
      spec.lines.forEach((name, i) => {
        const raw = other.columns[name] || [], y = isSmoothed() ? smoothed(raw, other.steps, view.smooth) : raw;
        let pen = false;
        ctx.setLineDash(dash(i).map((length) => length * ratio));
        ctx.beginPath();
        for (let at = 0; at < x.length; at++) {
          if (!known(y[at])) { pen &&= !!spec.points; continue; }
          const px = u.valToPos(x[at], "x", true), py = u.valToPos(y[at], "y", true);
          if (pen) ctx.lineTo(px, py); else ctx.moveTo(px, py);
          if (spec.points) ctx.fillRect(px - 2.5 * ratio, py - 2.5 * ratio, 5 * ratio, 5 * ratio);
          pen = true;
        }
        ctx.stroke();
      });
    });
    ctx.lineWidth = ratio;
    for (const event of run.events) {
      const fault = isFault(event);
      if (!fault && !MARKED.has(event.kind)) continue;
      const x = Math.round(u.valToPos(event[view.x] ?? -1, "x", true)) + 0.5;
      ctx.strokeStyle = colour(inkOf(event)); ctx.lineWidth = fault ? 1.5 * ratio : ratio;
      ctx.setLineDash(fault ? [] : [3 * ratio, 3 * ratio]);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.setLineDash([]);
    if (spec.points) spec.lines.forEach((name, i) => {
      const x = xs(), y = drawn().columns[name] || [], error = drawn().columns[`${name}_error`] || [];
      ctx.strokeStyle = ink(i); ctx.lineWidth = 1.25 * ratio;
      ctx.beginPath();
      for (let at = 0; at < x.length; at++) if (known(y[at]) && known(error[at])) {
        const px = u.valToPos(x[at], "x", true), [top, foot] = [y[at] + error[at], y[at] - error[at]].map((v) => u.valToPos(v, "y", true));
        ctx.moveTo(px, top); ctx.lineTo(px, foot);
        for (const end of [top, foot]) { ctx.moveTo(px - 3 * ratio, end); ctx.lineTo(px + 3 * ratio, end); }
      }
      ctx.stroke();
    });
    ctx.restore();
  }
  function say(u) {
    const inside = known(u.cursor.idx), of = inside ? drawn() : run, last = of.steps.length - 1, at = inside ? Math.min(u.cursor.idx, last) : last;
    if (last < 0) return;
    const place = at - of.first, bucket = place >= 0 && place < of.pairs ? [at - (place % 2), at - (place % 2) + 1] : [at];
    const named = [...new Set(bucket.map((i) => of.steps[i]))], many = named.length > 1;
    const parts = [el("span", {}, `${inside ? "" : "last, "}${many ? "steps" : "step"} `), el("b", {}, named.join(" to "))];
    spec.lines.forEach((name, i) => {
      const column = of.columns[name] || [], write = spec.share ? percent : number;
      let values = bucket.map((one) => column[one]).filter(known);
      for (let seen = at; spec.points && !values.length && seen > 0;) if (known(column[--seen])) values = [column[seen]];
      const ends = values.length ? [...new Set([Math.min(...values), Math.max(...values)].map(write))].join(" to ") : "–";
      if (several()) parts.push(el("span", {}, `${spec.lines.length > 1 ? `${DASHES[i % 6][1]} ` : ""}${label(name)} `));
      parts.push(el("span", { class: "once" }, key(hue(i)), !several() && label(name) ? `${label(name)} ` : "", el("b", {}, ends)));
      of.others.forEach((other, k) => {
        const near = nearest(xs(other), inside ? xs(of)[at] : Infinity, (one) => known(other.columns[name]?.[one]));
        if (near >= 0) parts.push(el("span", { class: "once" }, key(`s${k + 1}`), el("b", {}, write(other.columns[name][near]))));
      });
    });
    const mark = inside && run.events.find((e) => (isFault(e) || MARKED.has(e.kind)) && Math.abs(u.valToPos(e[view.x] ?? -1e9, "x") - u.cursor.left) < 4);
    if (mark) parts.unshift(el("span", { class: isFault(mark) ? "fault" : "" }, `${visible(mark.text, 90)}  `));
    else if (u.scales.y.min > 0) parts.push(el("span", {}, `axis from ${number(u.scales.y.min)}`));
    readout.replaceChildren(...parts);
  }
  function build(rows) {
    const series = [{}];
    spec.lines.forEach((name, i) => {
      const raw = () => (isSmoothed() ? `color-mix(in srgb, ${ink(i)} 35%, transparent)` : ink(i));
      series.push({ stroke: raw, dash: dash(i), width: 1.4, spanGaps: !!spec.points, points: { show: !!spec.points || run.steps.length < 3, size: 6, fill: () => ink(i), stroke: () => ink(i) } });
      if (isSmoothed()) series.push({ stroke: () => ink(i), dash: dash(i), width: 2, points: { show: false } });
    });
    const edges = bands().map(() => ({ stroke: "transparent", width: 0, points: { show: false } }));
    const first = series.length, fill = () => `color-mix(in srgb, ${ink(0)} 18%, transparent)`;
    return new uPlot({
      ...size, series: [...series, ...edges], legend: { show: false },
      bands: edges.length ? [{ series: [first + 1, first], fill }] : [],
      scales: { x: { time: false, range: () => padded() }, y: { range } },
      axes: [
        stepAxis(),
        { ...axis, size: 52, values: (u, at) => at.map((v) => (spec.share ? `${Number((100 * v).toPrecision(4))} %` : number(v))) }],
      cursor: CURSOR,
      hooks: { draw: [marks], setCursor: [say], setSelect: [selected] },
    }, rows, plot);
  }
  chart.measure = () => { size = { width: plot.clientWidth, height: plot.clientHeight }; };
  chart.draw = () => {
    chart.stale = false;
    if (!size) chart.measure();
    const rows = data();
    if (chart.u && chart.u.series.length !== rows.length) { chart.u.destroy(); chart.u = null; }
    if (chart.u) chart.u.setData(rows);
    else {
      chart.u = build(rows);
      chart.u.over.addEventListener("dblclick", () => zoom(null));
    }
    say(chart.u);
  };
  chart.resize = () => { chart.measure(); chart.u?.setSize(size); };
  chart.rebuild = () => { chart.u?.destroy(); chart.u = size = null; if (chart.seen) chart.draw(); else chart.stale = true; };
  return chart;
}

/** Dashes of the lines of one run, and how a text shows them. */
const DASHES = [[[], "──"], [[7, 4], "╌╌"], [[2, 3], "┄┄"], [[9, 3, 2, 3], "─·"], [[12, 3], "— —"], [[1, 5], "···"]];
/** The index of the last place up to `x` that is usable, or -1. */
function nearest(places, x, usable) {
  let low = 0, high = places.length;
  while (low < high) { const middle = (low + high) >> 1; if (places[middle] <= x) low = middle + 1; else high = middle; }
  while (--low >= 0 && !usable(low));
  return low;
}

/** A time of the run's clock: 1:02:03, 2:03, or seconds where minutes would hide what matters. */
function clock(s, step = 1) {
  if (step < 1 || s < 60) return `${Number(s.toFixed(step < 0.01 ? 4 : 2))} s`;
  const [h, m, rest] = [Math.floor(s / 3600), Math.floor(s / 60) % 60, String(Math.floor(s % 60)).padStart(2, "0")];
  return h ? `${h}:${String(m).padStart(2, "0")}:${rest}` : `${m}:${rest}`;
}
const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 1e6];
const TIMES = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];

/** Zoom of all curves and of the shares; null: the whole run. */
function zoom(range) {
  view.range = range;
  if (!range || (view.fine && (view.fine.low > range[0] || view.fine.high < range[1]))) view.fine = null;
  $("#whole").disabled = !range;
  redraw();
  attributed();
  refine();
}

function redraw() { for (const chart of charts.values()) if (chart.seen && chart.u) chart.draw(); else chart.stale = true; }

// ---------------------------------------------------------------- where the time went

const CAUSES = ["busy", "samples", "gate", "weights", "update", "save", "away", "other"];
const CAUSE_WORDS = {
  busy: "at work", samples: "waiting for samples", gate: "behind the staleness gate", weights: "waiting for new weights",
  update: "taking over weights", save: "saving", away: "away", other: "between messages",
};

/** What is drawn of the lines of attribution.jsonl. */
function attributed() { shares(); resources(); }

/** Shares of each role's time over the steps, the sentence that names its worst wait and the root of it, worst workers. */
function shares() {
  const body = $("#shares .body"), [low, high] = extent();
  const at = (line) => (view.x === "step" ? line.step : line.to_s);
  const lines = run.attribution.filter((line) => at(line) >= low && at(line) <= high);
  if (!run.attribution.length) return body.replaceChildren(note(why("attribution", "attribution.jsonl")));
  const roles = [...new Set(lines.flatMap((line) => Object.keys(line.roles)))], worst = {}, out = [];
  out.push(el("p", { class: "legend" }, ...CAUSES.map((c) => el("span", {}, key(c), CAUSE_WORDS[c]))));
  for (const role of roles) {
    const sums = Object.fromEntries(CAUSES.map((c) => [c, lines.reduce((sum, line) => sum + (line.roles[role]?.[c] || 0), 0)]));
    const total = CAUSES.reduce((sum, c) => sum + sums[c], 0) || 1;
    const canvas = el("canvas", { role: "img", "aria-label": `${role}: ${CAUSES.map((c) => `${c} ${percent(sums[c] / total)}`).join(", ")}` });
    out.push(el("div", { class: "role" }, el("b", {}, role, el("br"), el("span", { class: "note" }, `${percent(sums.busy / total)} at work`)), canvas,
      note(sentence(role, sums, total, lines))));
    requestAnimationFrame(() => drawShares(canvas, role, lines, low, high, at));
  }
  for (const line of lines) for (const [cause, workers] of Object.entries(line.worst || {})) for (const [who, s] of workers) (worst[cause] ??= new Map()).set(who, (worst[cause].get(who) || 0) + s);
  const rows = CAUSES.filter((c) => worst[c] && c !== "busy").map((c) => {
    const top = [...worst[c]].sort((a, b) => b[1] - a[1]).slice(0, 8);
    return el("tr", {}, el("td", {}, key(c), CAUSE_WORDS[c]), el("td", {}, top.map(([who, s]) => `${who} ${duration(s)}`).join(" · ")));
  });
  if (rows.length) out.push(el("details", {}, el("summary", {}, "Workers that lost most, by cause"), el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, ...rows)))));
  const open = body.querySelector("details")?.open;
  body.replaceChildren(...out);
  if (open) body.querySelector("details").open = true;
}

function sentence(role, sums, total, lines) {
  const waits = CAUSES.filter((c) => c !== "busy" && sums[c] / total >= 0.01).sort((a, b) => sums[b] - sums[a]).slice(0, 3);
  if (!waits.length) return `${role} was at work all the time.`;
  return `${role}: ${waits.map((c) => {
    const roots = new Map();
    for (const line of lines) for (const [of, cause, root, s] of line.roots || []) if (of === role && cause === c && root) roots.set(root, (roots.get(root) || 0) + s);
    const [root, s] = [...roots].sort((a, b) => b[1] - a[1])[0] || [];
    return `${percent(sums[c] / total)} ${CAUSE_WORDS[c]}${root ? `, because of ${blamed(root, Math.min(s / sums[c], 1))}` : ""}`;
  }).join("; ")}.`;
}

/** A root and its share of a wait; one that explains less than half of it is not named as the cause. */
const blamed = (root, share) => (share < 0.5 ? `several (${root} ${percent(share)} of that)` : `${root} (${percent(share)} of that)`);

function drawShares(canvas, role, lines, low, high, at) {
  const [c, width] = context(canvas, 64), columns = Math.max(1, Math.ceil(width / 2));
  const sums = CAUSES.map(() => new Float64Array(columns));
  for (const line of lines) {
    const own = line.roles[role], place = (x) => Math.min(columns - 1, Math.max(0, Math.floor(((x - low) / (high - low || 1)) * columns)));
    const from = place(view.x === "step" ? line.step - (line.steps || 1) + 0.5 : line.from_s), to = place(view.x === "step" ? line.step + 0.5 : line.to_s);
    if (own) for (let column = from; column <= to; column++) CAUSES.forEach((cause, i) => { sums[i][column] += (own[cause] || 0) / (to - from + 1); });
  }
  for (let column = 0; column < columns; column++) {
    const total = sums.reduce((sum, of) => sum + of[column], 0);
    let y = 64;
    if (total) CAUSES.forEach((cause, i) => {
      const height = (64 * sums[i][column]) / total;
      c.fillStyle = colour(cause);
      c.fillRect(2 * column, y - height, 2, height);
      y -= height;
    });
  }
}

// ---------------------------------------------------------------- resources

const GIB = 2 ** 30, gib = (bytes) => (known(bytes) ? `${Number((bytes / GIB).toPrecision(3))} GiB` : "–");
/** What is drawn of the resources: one figure of each role, or the rates of tokens. */
const USES = [
  { title: "Generated and trained tokens", rates: true, unit: "1/s", write: number },
  { title: "Tokens by device", rates: true, by: (role) => role.devices || role.workers, unit: "1/s a device; a worker where none is used", write: number },
  { title: "Device use", figure: "device_use", unit: "share of time", write: percent, none: "No device use: no worker has an accelerator whose driver tells it." },
  { title: "Device memory of tensors", figure: "device_allocated", unit: "GiB a worker", scale: 1 / GIB, write: gib, none: "No device memory: no worker has an accelerator." },
  { title: "Device memory held by torch", figure: "device_reserved", unit: "GiB a worker", scale: 1 / GIB, write: gib },
  { title: "Key-value cache in use", figure: "cache", unit: "share of its tokens", write: percent, none: "No cache use: no engine has told it." },
  { title: "Processors in use", figure: "processors", unit: "processors a worker", write: number },
  { title: "Memory of the process", figure: "memory", unit: "GiB a worker", scale: 1 / GIB, write: gib },
];
const WORST = { tokens_per_s: ["fewest tokens per second", number], device_use: ["least device use", percent], device_allocated: ["most device memory", gib], cache: ["fullest cache", percent], processors: ["most processors", number], memory: ["most memory", gib] };
const uses = { charts: new Map(), seen: false, scheme: "" };
new IntersectionObserver(([{ isIntersecting }]) => { uses.seen = isIntersecting; if (isIntersecting) resources(); }, { rootMargin: "200px" }).observe($("#resources"));

/** What the workers use; a damaged line of the file leaves this panel alone empty. */
function resources() {
  if (!uses.seen || !run.info) return;
  try { drawResources(); } catch (error) {
    uses.charts.clear();
    $("#resources .body").replaceChildren(note(`The resources cannot be shown: ${error.message}`));
  }
}

/** By role: now or at last as a table, over the steps as charts, and the workers with the worst values. */
function drawResources() {
  const body = $("#resources .body"), [low, high] = extent(), at = (line) => (view.x === "step" ? line.step : line.to_s);
  const all = run.attribution.filter((line) => line.resources?.roles), lines = all.filter((line) => at(line) >= low && at(line) <= high);
  const present = run.info.state === "live" && run.status?.resources, last = present || all.at(-1)?.resources;
  if (!body.querySelector(".now")) body.replaceChildren(el("div", { class: "now" }), el("p", { class: "legend" }), el("div", { class: "grid" }), el("p", { class: "missing note" }), el("div", { class: "worst" }));
  const [now, legend, grid, missing, worst] = body.children;
  if (!last) {
    now.replaceChildren(note(run.attribution.length && run.info.state !== "live" ? "No resources: the run was too short, or of an earlier version." : why("resources", "attribution.jsonl")));
    for (const place of [legend, grid, missing, worst]) place.replaceChildren();
    return uses.charts.clear();
  }
  const roles = [...new Set(all.flatMap((line) => Object.keys(line.resources.roles)))].sort();
  now.replaceChildren(usedBy(last, present ? "Now" : "At the end"));
  legend.replaceChildren(...roles.map((role, i) => el("span", {}, key(`s${i % 6}`), role)), el("span", {}, lines.length ? "Lines are medians over the workers of a role, areas reach from the least to the largest value." : ""));
  const scheme = colour("ink"), lacking = [];
  if (uses.scheme !== scheme) { grid.replaceChildren(); uses.charts.clear(); uses.scheme = scheme; }
  for (const use of USES) {
    const drawn = lines.length ? (use.rates ? ratesOf(use, lines) : figuresOf(use, lines, roles)) : [];
    const chart = uses.charts.get(use.title);
    if (drawn.length) drawUse(grid, use, lines.map(at), drawn, chart, lines);
    else {
      chart?.card.remove(); uses.charts.delete(use.title);
      if (use.none && all.length) lacking.push(use.none);
    }
  }
  missing.replaceChildren(lacking.join(" "));
  const rows = Object.entries(WORST).map(([name, [label, write]]) => [label, worstOf(lines, name), write]).filter(([, found]) => found.length);
  const open = worst.querySelector("details")?.open;
  worst.replaceChildren(rows.length ? el("details", { open }, el("summary", {}, "Workers with the worst values"), el("div", { class: "scroll" }, el("table", {}, el("tbody", {},
    ...rows.map(([label, found, write]) => row([label, found.map(([who, value]) => `${who} ${write(value)}`).join(" · ")])))))) : "");
}

/** The table of one line of resources: a row for each role. */
function usedBy({ roles }, title) {
  const figure = ({ figures }, name, write) => { const of = figures[name]; return !of ? "–" : of[0] === of[2] ? write(of[1]) : `${write(of[1])} (${write(of[0])} to ${write(of[2])})`; };
  const memory = (role) => (role.figures.device_allocated ? `${figure(role, "device_allocated", gib)} of ${gib(role.figures.device_total?.[2])}` : "–");
  const rows = Object.entries(roles).map(([name, role]) => row([name, right(role.workers), right(role.devices), right(number(role.tokens_per_s)), figure(role, "device_use", percent), memory(role),
    figure(role, "cache", percent), figure(role, "processors", number), figure(role, "memory", gib)]));
  return el("div", {}, el("h3", {}, title), table(["role", "workers#", "devices#", "tokens/s#", "device use", "device memory", "cache in use", "processors", "memory"], rows));
}

/** The workers with the worst values of a figure in these lines, worst first. */
function worstOf(lines, name) {
  const least = name === "tokens_per_s" || name === "device_use", found = new Map();
  for (const line of lines) for (const [who, value] of line.resources.worst?.[name] || []) found.set(who, found.has(who) ? Math[least ? "min" : "max"](found.get(who), value) : value);
  return [...found].sort((a, b) => (least ? a[1] - b[1] : b[1] - a[1])).slice(0, 5);
}

function figuresOf(use, lines, roles) {
  return roles.map((role, i) => ({ name: role, hue: `s${i % 6}`, values: lines.map((line) => line.resources.roles[role]?.figures[use.figure] || null) })).filter((one) => one.values.some(Boolean));
}

/** Tokens that are generated and trained in a second; with `use.by`, divided by what it has of the roles. */
function ratesOf(use, lines) {
  const trained = run.columns.tokens_per_s || [], sum = (values) => values.reduce((total, one) => total + one, 0);
  const share = (rate, roles) => (use.by ? rate / sum(roles.map(use.by)) : rate), triple = (value) => (known(value) ? [value, value, value] : null);
  const generated = ({ resources: { roles } }) => { const of = Object.values(roles).filter((role) => known(role.tokens_per_s)); return of.length ? share(sum(of.map((role) => role.tokens_per_s)), of) : null; };
  const learned = ({ step, resources: { roles } }, i) => {
    const before = i ? lines[i - 1].step : -1, of = trained.filter((rate, k) => known(rate) && run.steps[k] > before && run.steps[k] <= step);
    return of.length && roles.trainer ? share(sum(of) / of.length, [roles.trainer]) : null;
  };
  return [["generated", "s0", generated], ["trained, with prompts", "s2", learned]].map(([name, hue, of]) => ({ name, hue, values: lines.map(of).map(triple) })).filter((one) => one.values.some(Boolean));
}

/** One chart of resources: for each line its median, and the area between the least and the largest value. */
function drawUse(grid, use, x, drawn, before, lines) {
  const scaled = (value) => (known(value) ? value * (use.scale || 1) : null), areas = drawn.map((one) => one.values.some((of) => of && of[0] !== of[2]));
  const rows = [x], shape = drawn.map((one, i) => `${one.name} ${areas[i]}`).join();
  drawn.forEach(({ values }, i) => { for (const place of areas[i] ? [1, 2, 0] : [1]) rows.push(values.map((of) => (of ? scaled(of[place]) : null))); });
  let chart = before;
  if (!chart || chart.shape !== shape || chart.x !== view.x) {
    const card = el("div", { class: "card curve" }), plot = el("div", { class: "plot" }), readout = el("div", { class: "readout" });
    card.append(el("h3", {}, use.title, el("small", {}, `  ${use.unit}`)), plot, readout);
    if (chart) chart.card.replaceWith(card); else grid.append(card);
    chart = { card, plot, readout, shape, x: view.x };
    uses.charts.set(use.title, chart);
    const series = [{}], bands = [];
    drawn.forEach(({ hue }, i) => {
      series.push({ stroke: () => colour(hue), width: 1.4, spanGaps: true, points: { show: x.length < 3, size: 6, fill: () => colour(hue), stroke: () => colour(hue) } });
      if (!areas[i]) return;
      bands.push({ series: [series.length, series.length + 1], fill: () => `color-mix(in srgb, ${colour(hue)} 16%, transparent)` });
      series.push(...[0, 1].map(() => ({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } })));
    });
    chart.u = new uPlot({
      width: plot.clientWidth, height: plot.clientHeight, series, bands, legend: { show: false },
      scales: { x: { time: false, range: () => padded() }, y: { range: (u, low, high) => [0, known(high) && high > 0 ? 1.06 * high : 1] } },
      axes: [stepAxis(),
        { ...axis, size: 52, values: (u, at) => at.map((v) => (use.write === percent ? `${Number((100 * v).toPrecision(4))} %` : number(v))) }],
      cursor: CURSOR,
      hooks: { setCursor: [() => chart.say?.()], setSelect: [selected] },
    }, rows, plot);
    chart.u.over.addEventListener("dblclick", () => zoom(null));
  } else {
    if (chart.u.width !== chart.plot.clientWidth) chart.u.setSize({ width: chart.plot.clientWidth, height: chart.plot.clientHeight });
    chart.u.setData(rows);
  }
  chart.say = () => {
    const inside = known(chart.u.cursor.idx), i = inside ? Math.min(chart.u.cursor.idx, x.length - 1) : x.length - 1;
    const text = (of) => (!of ? "–" : of[0] === of[2] ? use.write(of[1]) : `${use.write(of[1])} (${use.write(of[0])} to ${use.write(of[2])})`);
    chart.readout.replaceChildren(el("span", {}, `${inside ? "" : "last, "}step `), el("b", {}, String(lines[i].step)),
      ...drawn.map(({ name, hue, values }) => el("span", { class: "once" }, key(hue), `${name} `, el("b", {}, text(values[i])))));
  };
  chart.say();
}

// ---------------------------------------------------------------- timeline

const ROWS = 64, GUTTER = 112, TOP = 18;
const lanes = { t0: 0, t1: 1, whole: [0, 1], first: null, data: null, image: null, at: null, follow: false, asked: 0 };

/** A lane a worker: work above, waits by cause below; more than 64 workers as a heat map of their busy share. */
function timeline() {
  const body = $("#timeline .body");
  const canvas = el("canvas", { class: "lanes", tabindex: 0, role: "img", "aria-label": "timeline of the workers; arrow keys move, plus and minus zoom, 0 shows all" });
  const readout = el("p", { class: "readout" }), legend = el("p", { class: "legend" }), text = el("div", { class: "opened" });
  const button = (name, action, label) => el("button", { type: "button", click: action, "aria-label": label }, name);
  const follow = el("input", { type: "checkbox", change: () => { lanes.follow = follow.checked; if (lanes.follow) tick(); } });
  const all = button("all workers", () => { lanes.first = null; ask(); }), said = el("output", {}, "none");
  const instant = el("input", { type: "range", step: "any", "aria-label": "instant of the run", input: () => mark(Number(instant.value)) });
  const slider = el("label", { class: "slider" }, "state of the controller at ", instant, said);
  const tools = el("div", { class: "tools" }, button("−", () => scale(1.6), "zoom out"), button("+", () => scale(1 / 1.6), "zoom in"), button("whole run", () => show(...lanes.whole)),
    el("label", {}, follow, " follow"), all, el("span", { class: "note" }, "Click, then the wheel zooms; drag moves. A click marks an instant, or opens the lanes of a row of the heat map."));
  all.hidden = true;
  slider.hidden = Boolean(embedded);

  function end() {
    return Math.max(run.columns.wall_s?.at(-1) || 0, run.events.at(-1)?.wall_s || 0, run.attribution.at(-1)?.to_s || 0, 1);
  }
  /** What was recorded may begin before the first step, and end after the last. */
  function extend(first, last) {
    const all = lanes.t0 <= lanes.whole[0] && lanes.t1 >= lanes.whole[1];
    lanes.whole = [Math.min(first, 0), Math.max(last, lanes.whole[1])];
    if (all) [lanes.t0, lanes.t1] = lanes.whole;
    reach();
  }
  /** The slider goes from the beginning to the end of the run; both may change. */
  function reach() {
    [instant.min, instant.max] = lanes.whole;
    instant.value = lanes.at ?? lanes.whole[1];
  }
  function show(t0, t1) {
    const [low, high] = lanes.whole, width = Math.min(Math.max(t1 - t0, 0.002), high - low);
    lanes.t0 = Math.min(Math.max(t0, low), high - width);
    lanes.t1 = lanes.t0 + width;
    draw();
    const have = lanes.data;
    const fine = have && have.t0 <= lanes.t0 && have.t1 >= lanes.t1 && (have.t1 - have.t0 < 4 * width || (!have.matrix && !have.left_out));
    if (!fine) later("timeline", ask, 130);
  }
  function scale(factor, at = (lanes.t0 + lanes.t1) / 2) { show(at - (at - lanes.t0) * factor, at + (lanes.t1 - at) * factor); }

  async function ask() {
    const ticket = ++lanes.asked, width = lanes.t1 - lanes.t0;
    const [t0, t1] = [Math.max(lanes.whole[0], lanes.t0 - width / 2), Math.min(lanes.whole[1], lanes.t1 + width / 2)];
    const opened = lanes.first === null ? "" : `&first=${lanes.first}`;
    try {
      const answer = await get(`api/timeline?t0=${t0.toFixed(4)}&t1=${t1.toFixed(4)}&rows=${ROWS}${opened}`);
      if (ticket === lanes.asked) take(answer);
    } catch (error) { readout.replaceChildren(visible(error.message)); }
  }
  function take(data) {
    lanes.data = data;
    lanes.image = null;
    if (known(data.last_s) && !lanes.follow) extend(data.first_s, data.last_s);
    if (!data.lanes.length) return body.replaceChildren(note(why("timeline", "timeline", "timeline.mb")));
    if (!canvas.isConnected) body.replaceChildren(tools, legend, canvas, readout, slider, text);
    if (data.matrix) lanes.image = heat(data.matrix);
    const first = data.first === undefined ? lanes.first || 0 : 0;
    lanes.shown = lanes.image ? data.lanes : data.lanes.slice(first, first + ROWS);
    lanes.offset = lanes.image ? 0 : first;
    all.hidden = lanes.first === null;
    const used = new Set([...data.spans.map((s) => data.kinds[s[1]]), ...data.waits.map((w) => data.causes[w[1]])]);
    const names = [...data.kinds.filter((k) => used.has(k)), ...data.causes.filter((c) => used.has(c))];
    legend.replaceChildren(...(lanes.image
      ? [el("span", {}, `${data.lanes.length.toLocaleString("en")} workers, about ${Math.ceil(data.lanes.length / data.matrix.rows)} a row; the darker, the busier.`)]
      : names.map((n) => el("span", {}, key(n), data.causes.includes(n) ? CAUSE_WORDS[n] || n : n))),
      data.left_out ? el("span", {}, `${data.left_out.toLocaleString("en")} spans are ${data.matrix ? "summed up" : "not shown"}: zoom in for each of them.`) : "");
    draw();
  }
  function heat({ columns, rows, base64 }) {
    const cells = atob(base64), picture = new OffscreenCanvas(columns, rows), c = picture.getContext("2d"), image = c.createImageData(columns, rows);
    const [r, g, b] = rgb(colour("s0"));
    for (let i = 0; i < cells.length; i++) image.data.set([r, g, b, cells.charCodeAt(i)], 4 * i);
    c.putImageData(image, 0, 0);
    return picture;
  }
  function height() { return TOP + (lanes.image ? Math.min(Math.max(2 * lanes.data.matrix.rows, 160), 512) : lanes.shown.length * rowHeight()); }
  function rowHeight() { return Math.min(Math.max(560 / lanes.shown.length, 11), 30); }
  function gutter() { return canvas.clientWidth < 600 ? 72 : GUTTER; }

  function draw() {
    if (!lanes.data || !canvas.isConnected) return;
    const began = performance.now(), { data, t0, t1 } = lanes, tall = height(), [c, width] = context(canvas, tall), left = gutter();
    const x = (t) => left + ((t - t0) / (t1 - t0)) * (width - left);
    c.textBaseline = "middle";
    ticks(c, x, width, tall, left);
    c.save(); c.beginPath(); c.rect(left, TOP, width - left, tall - TOP); c.clip();
    if (lanes.image) {
      c.imageSmoothingEnabled = false;
      c.drawImage(lanes.image, x(data.t0), TOP, x(data.t1) - x(data.t0), tall - TOP);
    } else bars(c, x, left, width);
    for (const event of run.events) if (isFault(event)) {
      c.fillStyle = colour("red");
      c.fillRect(x(event.wall_s), TOP, 1.5, tall);
    }
    if (lanes.at !== null) { c.fillStyle = colour("ink"); c.fillRect(x(lanes.at), TOP, 1, tall); }
    c.restore();
    c.fillStyle = colour("soft");
    if (!lanes.image) lanes.shown.forEach((lane, i) => c.fillText(fitted(c, lane.worker, left - 8), 0, TOP + (i + 0.5) * rowHeight()));
    else for (let i = 0; i < 16; i++) c.fillText(fitted(c, lanes.shown[Math.floor((i * lanes.shown.length) / 16)].worker, left - 8), 0, TOP + ((i + 0.5) * (tall - TOP)) / 16);
    performance.measure("timeline", { start: began, end: performance.now() });
  }
  function bars(c, x, left, width) {
    const { data, t0, t1, offset } = lanes, row = rowHeight(), busy = Math.round(row * 0.62) - 1, n = lanes.shown.length;
    const paint = (list, names, fields, top, tall) => {
      const byColour = new Map();
      for (const one of list) {
        const lane = one[0] - offset, start = one[fields], finish = one[fields + 1];
        if (lane < 0 || lane >= n || finish < t0 || start > t1) continue;
        const name = names[one[1]];
        if (!byColour.has(name)) byColour.set(name, []);
        byColour.get(name).push(x(start), TOP + lane * row + top, Math.max(x(finish) - x(start), 0.7));
      }
      for (const [name, boxes] of byColour) {
        c.fillStyle = colour(name);
        for (let i = 0; i < boxes.length; i += 3) c.fillRect(boxes[i], boxes[i + 1], boxes[i + 2], tall);
      }
    };
    c.fillStyle = colour("line");
    for (let i = 0; i <= n; i++) c.fillRect(left, TOP + i * row - 0.5, width - left, 0.5);
    paint(data.spans, data.kinds, 2, 1, busy);
    paint(data.waits, data.causes, 3, busy + 1, Math.max(row - busy - 3, 2));
  }
  function ticks(c, x, width, tall, left) {
    const { t0, t1 } = lanes, step = TIMES.find((one) => one >= (t1 - t0) / Math.max(2, (width - left) / 90)) || 604800;
    c.fillStyle = colour("soft");
    for (let t = Math.ceil(t0 / step) * step; t <= t1; t += step) {
      c.fillStyle = colour("line"); c.fillRect(x(t), TOP - 4, 1, tall);
      c.fillStyle = colour("soft"); if (x(t) < width - 30) c.fillText(clock(t, step), x(t) + 3, 8);
    }
  }
  function under(event) {
    const { data } = lanes, box = canvas.getBoundingClientRect(), width = box.width, left = gutter();
    const t = lanes.t0 + ((event.clientX - box.left - left) / (width - left)) * (lanes.t1 - lanes.t0), y = event.clientY - box.top - TOP;
    if (lanes.image) {
      const { rows, columns, base64 } = data.matrix, row = Math.floor((y / (height() - TOP)) * rows);
      const column = Math.floor(((t - data.t0) / (data.t1 - data.t0)) * columns), share = atob(base64).charCodeAt(row * columns + column) / 255;
      const first = Math.floor((row * data.lanes.length) / rows), last = Math.max(first, Math.floor(((row + 1) * data.lanes.length) / rows) - 1);
      return { t, first, text: data.lanes[first] && `${data.lanes[first].worker} to ${data.lanes[last].worker}: ${percent(share)} busy at ${clock(t)}` };
    }
    const lane = Math.floor(y / rowHeight()) + lanes.offset, name = data.lanes[lane]?.worker, near = (2 * (lanes.t1 - lanes.t0)) / width;
    const span = data.spans.find((s) => s[0] === lane && s[2] - near <= t && t <= s[3] + near), wait = data.waits.find((w) => w[0] === lane && w[3] <= t && t <= w[4]);
    const parts = [name, clock(t)];
    if (span) parts.push(`${data.kinds[span[1]]} for ${duration(span[3] - span[2])}${known(span[4]) ? `, ${number(span[4])} rows` : ""}`);
    if (wait) parts.push(`${CAUSE_WORDS[data.causes[wait[1]]] || data.causes[wait[1]]} for ${duration(wait[4] - wait[3])}${data.roots[wait[2]] ? `, because of ${data.roots[wait[2]]}` : ""}`);
    return { t, text: name && parts.join(" · ") };
  }
  /** Marks an instant, and asks for the state of the controller then. */
  function mark(at) {
    lanes.at = at;
    instant.value = at;
    said.replaceChildren(clock(at));
    draw();
    if (!embedded) later("replay", replay, 200);
  }
  async function replay() {
    const at = lanes.at;
    if (!text.childElementCount) text.replaceChildren(note("The recording is replayed."));
    try {
      for (;;) {
        const answer = await get(`api/replay?at=${at.toFixed(3)}`);
        if (at !== lanes.at) return;
        if (!known(answer.reached_s)) return text.replaceChildren(...instantState(at, answer));
        text.replaceChildren(note(`The recording is replayed: ${clock(answer.reached_s)} of ${clock(at)}.`));
      }
    } catch (error) { if (at === lanes.at) text.replaceChildren(el("h3", {}, `Controller at ${clock(at)}`), note(error.message)); }
  }

  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), left = gutter(), share = Math.max(0, (event.clientX - box.left - left) / (box.width - left));
    scale(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 240) * 0.002), lanes.t0 + share * (lanes.t1 - lanes.t0));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, t0: lanes.t0, t1: lanes.t1, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return readout.replaceChildren(visible(under(event).text || ""));
    const by = ((event.clientX - drag.x) / (canvas.clientWidth - gutter())) * (drag.t1 - drag.t0);
    drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
    if (drag.moved) show(drag.t0 - by, drag.t1 - by);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) {
      const { t, first } = under(event);
      if (lanes.image && first !== undefined) {
        lanes.first = Math.min(first, Math.max(lanes.data.lanes.length - ROWS, 0));
        ask();
      } else {
        readout.replaceChildren(visible(under(event).text || ""));
        mark(Math.min(Math.max(t, lanes.whole[0]), lanes.whole[1]));
      }
    }
    drag = null;
  });
  canvas.addEventListener("keydown", (event) => {
    const width = lanes.t1 - lanes.t0;
    const move = (by) => () => show(lanes.t0 + by, lanes.t1 + by);
    const act = {
      ArrowLeft: move(-width / 5), ArrowRight: move(width / 5), "+": () => scale(0.7), "-": () => scale(1 / 0.7), 0: () => show(...lanes.whole),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  function tick() {
    lanes.whole[1] = end();
    reach();
    if (lanes.follow) { lanes.t1 = lanes.whole[1]; lanes.t0 = Math.max(0, lanes.t1 - 30); ask(); }
  }
  lanes.whole = [0, end()];
  [lanes.t0, lanes.t1] = lanes.whole;
  reach();
  timeline.draw = () => { if (lanes.data?.matrix) lanes.image = heat(lanes.data.matrix); draw(); };
  timeline.tick = tick;
  timeline.ask = ask;
  body.replaceChildren(note("The timeline is read."));
  return ask();
}

/** The state of the controller at an instant, from a replay of its recording. */
function instantState(at, state) {
  const counts = (numbers) => Object.entries(numbers).map(([name, n]) => `${n.toLocaleString("en")} ${name.replace("_", " ")}`).join(", ");
  const fold = (name, rows, ...inside) => (rows.length ? el("details", {}, el("summary", {}, name), ...inside) : null);
  const more = (n) => (n ? note(`${n.toLocaleString("en")} more are not shown.`) : null);
  const stages = Object.entries(state.slots), versions = Object.entries(state.counts.versions).sort((a, b) => b[0] - a[0]);
  const leases = state.leases.map((one) => row([one.worker, one.stage, right(one.step < 0 ? "" : one.step), right(duration(one.left_s)),
    one.samples.slice(0, 6).map(([epoch, prompt, member]) => `${epoch}:${prompt}/${member}`).join(", ") + (one.samples.length > 6 ? ` and ${one.samples.length - 6} more` : "")]));
  const facts = [["step", `${state.step} of ${state.steps}`], ["prompts in flight", state.live_groups], ["newest version", state.latest_version], ["dropped", counts(state.dropped) || "none"],
    ["after event", `${(state.events - 1).toLocaleString("en")} of term ${state.term}`], ...(state.ended ? [["ended", state.ended[0]]] : [])];
  const titled = (title, ...inside) => el("div", {}, el("h3", {}, title), ...inside);
  return [
    el("h3", {}, `Controller at ${clock(at)} of the run`),
    ...alarms(state).slice(0, 6).map((text) => el("p", { class: "alarm" }, text)),
    el("dl", { class: "legend line-list" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))),
    el("div", { class: "instant" },
      titled("Samples by stage", table(["stage", "not begun#", "at work#", "done#"], stages.map(([name, n]) => row([name, right(n.not_begun), right(n.at_work), right(n.done)])))),
      titled("Versions of the weights", versions.length ? table(["version#", "workers#"], versions.map(([version, n]) => row([right(version < 0 ? "none" : version), right(n)]))) : note("No worker has weights yet.")),
      titled("Workers", table(["role", "states"], Object.entries(state.counts.states).map(([role, states]) => row([role, counts(states)]))))),
    titled("Who waited for whom", ...waitTables(state.graph, state.more_waits)),
    fold(`What held up each waiting worker (${state.causes.length + state.more_causes})`, state.causes,
      table(["worker", "cause", "root", "since#"], state.causes.map(([who, cause, root, s]) => row([who, CAUSE_WORDS[cause] || cause, root, right(duration(s))]))), more(state.more_causes)),
    fold(`Who worked on what (${state.leases.length + state.more_leases})`, leases, table(["worker", "stage", "step#", "ends in#", "samples, as epoch:prompt/sample"], leases), more(state.more_leases)),
    fold(`Version of each worker (${Object.keys(state.versions).length})`, Object.keys(state.versions), table(["worker", "version#"], Object.entries(state.versions).map(([who, n]) => row([who, right(n)])))),
  ].filter(Boolean);
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function fitted(c, text, width) {
  let shown = visible(text, 60);
  if (c.measureText(shown).width <= width) return shown;
  while (shown.length > 1 && c.measureText(`${shown}…`).width > width) shown = shown.slice(0, -1);
  return `${shown}…`;
}

// ---------------------------------------------------------------- waits

/** Who waits for whom now. */
function waits() {
  const body = $("#waits .body"), graph = run.status?.graph;
  if (run.info.state !== "live" || embedded) return body.replaceChildren(note("Nothing waits: the run is not live."));
  if (!graph) return body.replaceChildren(note("No controller answers."));
  body.replaceChildren(...waitTables(graph, 0));
}

/** Root chains and the table of waits, oldest first; equal waits of one worker are one row. */
function waitTables(graph, unlisted) {
  const list = graph.waits || [], merged = new Map(), chains = new Map(), holds = new Map((graph.workers || []).map((w) => [w[0], w[4] || w[2]]));
  for (const wait of list) {
    const name = [wait.who, wait.what.replace(/\d+/g, "#"), wait.blocked_on].join("|"), same = merged.get(name);
    merged.set(name, { ...(same && same.age_s >= wait.age_s ? same : wait), times: (same?.times || 0) + 1 });
  }
  const blocked = new Map(list.filter((w) => w.blocked_on).map((w) => [w.who, w.blocked_on.split(", ")[0].replace(/ and \d+ more$/, "")]));
  for (const [who, by] of [...blocked].slice(0, 64)) chains.set(by, [...(chains.get(by) || []), who]);
  const roots = [...chains.keys()].filter((name) => !blocked.has(name));
  const behind = (name, seen) => {
    const direct = (chains.get(name) || []).filter((who) => !seen.includes(who)), shown = direct.slice(0, 8).map((who) => who + (chains.has(who) ? ` (and so ${behind(who, [...seen, who])})` : ""));
    return shown.join(", ") + (direct.length > 8 ? ` and ${direct.length - 8} more` : "");
  };
  const rows = [...merged.values()].sort((a, b) => b.age_s - a.age_s).map((w) => row(
    [w.times > 1 ? `${w.who} × ${w.times}` : w.who, w.what, right(duration(w.age_s)), right(w.limit_s === null ? "none" : duration(w.limit_s)), w.blocked_on || "no worker"],
    { class: w.overdue || w.unsatisfiable ? "fault" : undefined }));
  const card = (root) => {
    const held = holds.get(root) ? ` (${visible(holds.get(root), 80)})` : "";
    return el("div", { class: "card chain" }, el("b", {}, root), el("i", {}, `${held} holds up `), behind(root, [root]));
  };
  const left = (graph.more || 0) + (graph.others || 0) + unlisted;
  return [
    el("div", { class: "chains" }, ...roots.map(card)),
    rows.length ? table(["who", "waits for", "since#", "limit#", "blocked on"], rows) : note(Object.keys(status.workers || {}).length ? "No worker waits: all are at work." : "No worker waits: none has joined."),
    left ? note(`${left} waits and workers are not shown.`) : "",
  ];
}

const note = (...children) => el("p", { class: "note" }, ...children);
const right = (value) => el("td", { class: "n" }, String(value ?? "–"));
/** A row of a table: cells as they are, everything else in cells of its own. */
const row = (cells, attributes = {}) => el("tr", attributes, ...cells.map((c) => (c instanceof HTMLTableCellElement ? c : el("td", {}, c))));

/** A table in a scrolling box; a name with "#" is a column of numbers. */
function table(names, rows, kind = "") {
  const head = names.map((n) => el("th", { class: `${n.includes("#") ? "n " : ""}${/w\d+$/.exec(n)?.[0] || ""}`, scope: "col" }, n.replace(/#|w\d+$/g, "")));
  return el("div", { class: "scroll", tabindex: 0 }, el("table", { class: kind }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

// ---------------------------------------------------------------- prompts, events, files

/** States of all prompts in the ledger, and why some were dropped; a count opens the list of its prompts. */
async function prompts() {
  const body = $("#prompts .body");
  let ledger;
  try { ledger = await get("api/ledger"); } catch (error) { return body.replaceChildren(note(error.message)); }
  const states = Object.entries(ledger.states || {}), most = Math.max(1, ...states.map(([, n]) => n)), dropped = Object.entries(ledger.dropped || {});
  if (!states.length) return body.replaceChildren(note(why("prompts", "ledger.sqlite")));
  const bar = (n) => { const made = el("span", { class: "bar" }); made.style.width = `${(100 * n) / most}%`; return made; };
  const named = (name) => name.replace("_", " "), plain = (n) => right(n.toLocaleString("en"));
  const count = (n, state, reason) => (embedded || !n ? plain(n) : el("td", { class: "n" },
    el("button", { type: "button", class: "count", "aria-label": `list the ${n} prompts: ${visible(reason || named(state), 80)}`, click: () => promptList(state, reason, 0) }, n.toLocaleString("en"))));
  const counts = body.querySelector(".counts") || el("div", { class: "counts" });
  if (counts.contains(document.activeElement)) return; // a count has the focus, which a new table would take
  counts.replaceChildren(
    table(["state", "prompts#", ""], states.map(([name, n]) => row([named(name), count(n, name, ""), el("td", { class: "w9" }, bar(n))]))), el("h3", {}, "Dropped"),
    dropped.length ? table(["reason", "groups#"], dropped.map(([name, n]) => row([name, count(n, "dropped", name)]))) : note("No prompt was dropped."));
  if (!counts.isConnected) body.replaceChildren(counts, el("div", { class: "opened" }));
}

/** The prompts behind a count; each opens its samples, and its life in the ledger. */
async function promptList(state, reason, offset) {
  const place = $("#prompts .opened"), life = el("div"), query = new URLSearchParams({ state, reason, limit: PAGE, offset });
  const close = el("button", { type: "button", click: () => place.replaceChildren() }, "close");
  let answer;
  try { answer = await get(`api/prompts?${query}`); } catch (error) { return place.replaceChildren(note(error.message), close); }
  const { prompts: found, total } = answer;
  const line = (one) => {
    const act = () => {
      for (const other of place.querySelectorAll("tr.chosen")) other.classList.remove("chosen");
      made.classList.add("chosen");
      samples.of(one);
      lifeOf(one).then((rows) => life.replaceChildren(...rows));
    };
    const made = row([nameOf(one), right(one.step), right(number(one.reward)), one.reason],
      { class: "open", tabindex: 0, "aria-label": `samples of prompt ${nameOf(one)}`, click: act, keydown: (event) => { if (event.key === "Enter") act(); } });
    return made;
  };
  const turn = (label, by) => { const at = offset + by, b = el("button", { type: "button", click: () => promptList(state, reason, at) }, label); b.disabled = at < 0 || at >= total; return b; };
  const span = total ? `${(offset + 1).toLocaleString("en")} to ${(offset + found.length).toLocaleString("en")} of ${total.toLocaleString("en")}` : "There is none any more.";
  place.replaceChildren(el("h3", {}, `Prompts: ${visible(reason || state.replace("_", " "), 200)}`),
    el("div", { class: "tools" }, el("span", { class: "note" }, span), ...(total > PAGE ? [turn("before", -PAGE), turn("next", PAGE)] : []), close),
    table(["prompt", "step#", "reward#", "reason"], found.map(line)), life);
  place.querySelector(".scroll").focus();
}

/** What the ledger has about a prompt. */
async function lifeOf(of) {
  try {
    const { events: lived } = await get(`api/prompt/${of.epoch}/${of.prompt}`);
    const rows = lived.map((e) => row([right(clock(e.at_s)), e.state, right(e.step), right(number(e.reward)), e.reason || ""]));
    return rows.length ? [el("h3", {}, `Life of prompt ${nameOf(of)}`), table(["at#", "state", "step#", "reward#", "reason"], rows)] : [];
  } catch { return []; } // a run without a ledger is no fault
}

const eventRow = (e) => row([right(clock(e.wall_s)), right(e.step), el("td", { class: "once" }, e.kind.replace("_", " ")), e.text], { class: { red: "fault", amber: "warned" }[inkOf(e)] });
/** What happened, newest first; faults in red. */
function events() {
  const body = $("#events .body");
  if (!run.events.length) return body.replaceChildren(note(why("events", "events.jsonl")));
  const faults = run.events.filter(isFault).length, old = body.querySelector("select")?.value || "notable";
  const options = [["notable", "without versions and checkpoints"], ["all", "all"], ["faults", `faults alone (${faults})`]];
  const choice = el("select", { "aria-label": "which events", change: events }, ...options.map(([value, label]) => el("option", { value }, label)));
  choice.value = old;
  const kept = run.events.filter((e) => (old === "all" ? true : old === "faults" ? isFault(e) : !["published", "checkpoint"].includes(e.kind)));
  body.replaceChildren(el("div", { class: "tools" }, choice, el("span", { class: "note" }, kept.length > 400 ? `the newest 400 of ${kept.length}` : kept.length === 1 ? "1 event" : `${kept.length} events`)),
    kept.length ? table(["at#", "step#", "kind", "what"], kept.slice(-400).reverse().map(eventRow)) : note("No event of this kind."));
}

/** The value of a setting as text. */
const say = (value) => (value === "" ? "(empty)" : typeof value === "string" ? value : JSON.stringify(value));
/** The settings in which the compared runs differ, with the value of each run. */
async function differences() {
  const body = $("#differences");
  if (!run.info.compared?.length) return;
  const { settings } = await get("api/differences").catch(() => ({ settings: null }));
  if (!settings) return body.replaceChildren(note("The settings of the runs cannot be compared."));
  if (!settings.length) return body.replaceChildren(note("The runs have the same settings."));
  const head = ["setting", run.info.name, ...run.info.compared].map((name) => el("th", { scope: "col" }, name));
  const rows = settings.map(([name, ...values]) => row([name, ...values.map((value) => (value === null ? "–" : say(value)))]));
  const title = settings.length === 1 ? "1 setting differs" : `${settings.length} settings differ`;
  body.replaceChildren(el("details", { open: settings.length <= 12 }, el("summary", {}, title),
    el("div", { class: "scroll", tabindex: 0 }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)))));
}

/** Configuration against the defaults, summary, last lines of the logs. */
async function files() {
  const body = $("#files .body"), { info } = run;
  const flat = (value, path = "") => (value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).flatMap(([k, v]) => flat(v, path ? `${path}.${k}` : k)) : [[path, value]]);
  const two = (pairs) => table(["name", "value"], pairs.map(([name, value]) => row([name, say(value)])), "settings");
  const fold = (name, ...inside) => el("details", {}, el("summary", {}, name), ...inside);
  const log = ([name, lines]) => fold(`Log: ${visible(name, 80)}, last ${lines.length} lines`, el("pre", { tabindex: 0 }, visible(lines.join("\n"), 40000)));
  let logs = {};
  try { logs = (await get("api/logs")).files; } catch { /* below */ }
  body.replaceChildren(
    info.changed?.length ? table(["setting", "value", "default"], info.changed.map(([name, ...values]) => row([name, ...values.map(say)])), "settings") : note(info.changed ? "Every setting has its default." : "Written by another version of flowrt."),
    fold("All settings", two(flat(info.config))),
    info.summary ? fold("Summary", two(flat(info.summary))) : note(info.state === "live" ? "The summary is written at the end." : "No summary: the run did not end in order."),
    ...Object.entries(logs).filter(([, lines]) => lines.length).map(log),
    Object.keys(logs).length ? "" : note("There are no logs."));
}

// ---------------------------------------------------------------- live

const timers = new Map();
/** Calls `action` once, `ms` after the first of several requests. */
function later(name, action, ms) {
  if (!timers.has(name)) timers.set(name, setTimeout(() => { timers.delete(name); action(); }, ms));
}

function live() {
  const stream = new EventSource("api/stream");
  const on = (name, act) => stream.addEventListener(name, (message) => act(JSON.parse(message.data)));
  stream.onopen = () => {
    live.lost = "";
    header();
    catchUp(!live.opened);
    live.opened = true;
  };
  stream.onerror = () => {
    live.lost = "connection lost";
    header();
    if (stream.readyState === EventSource.CLOSED) setTimeout(live, 1000);
  };
  on("status", (status) => { run.status = status; later("status", () => { header(); waits(); later("resources", resources, 2000); }, 50); });
  on("step", (line) => {
    // Steps may have been missed while there was no connection.
    if (line.step > (run.steps.at(-1) ?? -1) + 1) return later("missed", missed, 50);
    const numbers = Object.entries(line).filter(([, value]) => known(value)).map(([name, value]) => [name, [value]]);
    addSeries({ steps: [line.step], columns: Object.fromEntries(numbers) });
    if (run.steps.length > 4 * POINTS) later("missed", missed, 50);
    newSteps();
  });
  on("event", (event) => {
    if (live.catching) { live.again = true; return; }
    const same = (one) => one.unix_s === event.unix_s && one.text === event.text && one.worker === event.worker;
    if (run.events.slice(-100).some(same)) return; // it has come with the answer to a request, too
    run.events.push(event);
    run.next++;
    later("events", () => { events(); curves(); timeline.draw(); }, 50);
    if (event.kind === "ended") setTimeout(catchUp, 1500, false);
  });
  on("rewound", ({ step }) => { dropFrom(step); later("curves", curves, 50); });
}

function newSteps() {
  later("curves", () => { header(); curves(); timeline.tick(); }, 300);
  later("attribution", moreAttribution, 2000);
  later("tables", () => { samples.refresh(); prompts(); }, 5000);
}

async function missed() {
  try { await moreSteps(); newSteps(); } catch { /* with the next step again */ }
}

/** Fetches the steps after the last one; the whole run again if too many of them would be drawn. */
async function moreSteps() {
  const first = (run.steps.at(-1) ?? -1) + 1, more = await get(`api/series?from=${first}`);
  if (!more.decimated && run.steps.length + more.steps.length < 4 * POINTS) return addSeries(more);
  const whole = await get(`api/series?from=0&points=${POINTS}`);
  cutFrom(0);
  addSeries(whole);
  addLastEvaluations();
}

async function moreAttribution() {
  const last = run.attribution.at(-1)?.step ?? -1;
  const { lines } = await get(`api/attribution?from=${last + 1}`).catch(() => ({ lines: [] }));
  run.attribution = run.attribution.filter((line) => !lines.length || line.step < lines[0].step).concat(lines);
  if (lines.length) attributed();
}

/** What has happened since the page was filled, or since the connection was lost, and nothing else. */
async function catchUp(isFirst) {
  live.catching = true;
  try {
    if (!isFirst) run.info = await get("api/run");
    do {
      live.again = false;
      const { events: fresh, next } = await get(`api/events?from=${run.next}`);
      for (const event of fresh) if (event.kind === "rolled_back" && known(event.first)) dropFrom(event.first);
      run.events.push(...fresh);
      run.next = next;
    } while (live.again);
    live.catching = false;
    await moreSteps();
    addLastEvaluations();
    header(); curves(); events();
    if (!isFirst) { waits(); files(); prompts(); moreAttribution(); timeline.tick(); }
  } catch { later("again", () => catchUp(isFirst), 1000); }
}

async function start() {
  try {
    const [info, series, log] = await Promise.all([get("api/run"), get(`api/series?from=0&points=${POINTS}`), get("api/events?from=0")]);
    run.info = info; run.events = log.events; run.next = log.next;
    addSeries(series);
    addLastEvaluations();
  } catch (error) {
    $("#alarms").replaceChildren(el("p", { class: "alarm" }, `The run cannot be shown: ${error.message}`));
    return;
  }
  if (!embedded && /\/run\/[^/]+\/$/.test(location.pathname)) $(".title").prepend(el("a", { href: "../../" }, "All runs"));
  header();
  curves();
  drawAll([...charts.values()].filter((chart) => chart.stale && chart.card.getBoundingClientRect().top < innerHeight));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done))); // curves are seen before the rest is made
  performance.mark("drawn");
  waits(); events();
  if (!embedded) live();
  await Promise.all([compare(), differences(), moreAttribution().then(attributed), timeline(), samples(), prompts(), files()]);
  performance.mark("complete");
}

$("#view").addEventListener("change", () => {
  const form = new FormData($("#view")), turned = form.get("x") !== view.x;
  Object.assign(view, { x: form.get("x"), y: form.get("y"), smooth: Number(form.get("smooth")) });
  if (turned) zoom(null);
  for (const chart of charts.values()) chart.rebuild();
});
$("#whole").addEventListener("click", () => zoom(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours = new Map(); for (const chart of charts.values()) chart.rebuild(); attributed(); timeline.draw?.(); distributions.draw?.(); });
addEventListener("resize", () => later("resize", () => { for (const chart of charts.values()) chart.resize(); attributed(); timeline.draw?.(); distributions.draw?.(); }, 150));
start();
