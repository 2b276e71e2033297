// The stored samples of a run: filters, their distributions, and a table of groups or of samples. Loaded before page.js, whose
// functions it calls.
"use strict";

const PAGE = 50, MEMBERS = 64, REASONS = ["timeout", "error", "memory", "died", "invalid", "http", "filtered", "lost"], ENDED = { filtered: "filtered", lost: "lost" };
const NAMED_ORDERS = [["newest", "newest"], ["worst", "worst reward"], ["best", "best reward"], ["random", "random"]];

// ---------------------------------------------------------------- the answers of run.html

const asNumber = (value) => (typeof value === "boolean" ? Number(value) : value);

/** Sorts by a column, or by a named order; what has no number in it comes last, and equal ones newest first. */
function sortedBy(order, all, columns) {
  const named = { newest: "-step", worst: "reward", best: "-reward" }[order] || order, name = named.replace(/^-/, ""), sign = named.startsWith("-") ? -1 : 1;
  const of = order === "random" ? (one) => (one.id * 7919) % 1009 : columns[name] || ((one) => asNumber(one[name]));
  const compared = (a, b) => {
    const [x, y] = [of(a), of(b)], [hasX, hasY] = [x, y].map((value) => value !== null && value !== undefined);
    if (!hasX || !hasY) return hasY - hasX;
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  };
  return all.sort((a, b) => compared(a, b) || b.step - a.step || b.id - a.id);
}

const isOfGroup = (a, b) => a.prompt === b.prompt && a.epoch === b.epoch && a.run_attempt === b.run_attempt && (a.eval_name || "") === (b.eval_name || "") && (!a.eval_name || a.step === b.step);

/** The conditions of a request that samples and groups have in common. */
function conditions(asked) {
  const has = (name, test) => (asked.get(name) ? [test(asked.get(name))] : []);
  return [
    ...has("step", (v) => (one) => one.step === Number(v)), ...has("from", (v) => (one) => one.step >= Number(v)), ...has("to", (v) => (one) => one.step <= Number(v)),
    ...has("prompt", (v) => (one) => one.name === v || one.prompt === Number(v)), ...has("epoch", (v) => (one) => one.epoch === Number(v)),
    (one) => (one.eval_name || "") === (asked.get("eval") || ""),
  ];
}

function paged(name, all, asked) {
  const from = Number(asked.get("offset") || 0);
  return { [name]: all.slice(from, from + Number(asked.get("limit") || PAGE)), total: all.length };
}

const distinct = (all) => [...new Map(all.map((one) => [one.id, one])).values()];

function samplesOfFile(all, asked) {
  const unique = distinct(all), of = asked.get("group") && [...unique, ...distinct(groupsInFile())].find((one) => one.id === Number(asked.get("group")));
  let pattern;
  try { pattern = new RegExp(asked.get("grep") || "", "i"); } catch { throw new Error("this is no regular expression"); }
  const has = (name, test) => (asked.get(name) ? [test(asked.get(name))] : []);
  const wanted = [
    ...(asked.get("group") ? [(one) => of && isOfGroup(one, of)] : conditions(asked)),
    ...has("reason", (v) => (one) => (one.reason || "").startsWith(v)),
    ...has("shortest", (v) => (one) => (one.count ?? one.tokens) >= Number(v)), ...has("longest", (v) => (one) => (one.count ?? one.tokens) <= Number(v)),
    (one) => pattern.test(one.completion) || pattern.test(one.prompt_text),
  ];
  const kept = unique.filter((one) => wanted.every((test) => test(one)));
  return paged("samples", sortedBy(asked.get("order") || "newest", kept, { ended: (one) => one.finish + one.reason }), asked);
}

const groupsInFile = () => Object.keys(embedded || {}).filter((path) => path.startsWith("api/groups")).flatMap((path) => embedded[path].groups);

function groupsOfFile(all, asked) {
  for (const name of ["grep", "reason", "shortest", "longest", "right"]) if (asked.get(name)) throw new Error("In this file groups are chosen by step and prompt only; flowrt watch on the run directory has the other filters.");
  const wanted = conditions(asked), kept = distinct(all).filter((one) => wanted.every((test) => test(one)));
  return paged("groups", sortedBy(asked.get("order") || "newest", kept, {}), asked);
}

// ---------------------------------------------------------------- tables

/**
 * A table whose columns are sorted by a click on their heads. `columns`: of each its name in orders (empty: not sorted by), its
 * label, what it is, its class, and whether its largest values come first. `sort` gets the new order.
 */
function sortedTable(columns, rows, order, sort, kind) {
  const head = columns.map(({ by, label, title, kind: of, down }) => {
    if (!by) return el("th", { class: of, scope: "col", "data-c": label, title }, label);
    const now = order === by ? "ascending" : order === `-${by}` ? "descending" : "none";
    const next = now === "descending" || (now === "none" && !down) ? by : `-${by}`;
    const mark = { ascending: " ▲", descending: " ▼", none: "" }[now];
    return el("th", { class: of, scope: "col", "data-c": by, "aria-sort": now },
      el("button", { type: "button", class: "sort", title: `${title || label}: sort by it`, "data-by": by, click: () => sort(next) }, label, el("span", { "aria-hidden": "true" }, mark)));
  });
  return el("div", { class: "scroll", tabindex: 0 }, el("table", { class: kind }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

/** A cell of a column; `kind` is the class of its numbers. */
const cell = (name, kind, ...children) => el("td", { class: kind, "data-c": name }, ...children);
const partsOf = (s) => Object.entries(s.parts || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
const endOf = (s) => {
  const bad = s.reason && !/^(ok|trained|)$/.test(s.reason);
  return cell("ended", bad ? "fault" : "", [s.finish, s.reason, s.eval_name && `of ${s.eval_name}`].filter(Boolean).join(", "));
};
const nameOf = (one) => `${one.epoch ? `${one.epoch}:` : ""}${one.name ?? one.prompt}`;
const clipped = (name, text) => cell(name, "", el("div", {}, visible(text ?? "", 240)));

const SAMPLE_COLUMNS = [
  { by: "step", label: "step", kind: "n w5", down: true }, { by: "prompt", label: "prompt", kind: "w7" }, { by: "reward", label: "reward", kind: "n w5", down: true },
  { by: "advantage", label: "adv.", title: "advantage, as it was trained", kind: "n w5", down: true }, { label: "parts", kind: "w9" },
  { by: "tokens", label: "tokens", title: "response tokens", kind: "n w5", down: true }, { by: "staleness", label: "stale", title: "staleness in versions", kind: "n w5", down: true },
  { by: "ended", label: "ended", kind: "w7" }, { label: "prompt text", kind: "w16" }, { label: "completion", kind: "" },
];
const MEMBER_COLUMNS = [{ by: "member", label: "no.", title: "number in the group", kind: "n w4" }, ...SAMPLE_COLUMNS.filter(({ label }) => !["step", "prompt", "prompt text"].includes(label))];
const GROUP_COLUMNS = [
  { by: "step", label: "step", kind: "n w5", down: true }, { by: "prompt", label: "prompt", kind: "w7" }, { by: "reward", label: "reward", title: "mean reward", kind: "n w5", down: true },
  { by: "spread", label: "spread", title: "standard deviation of the rewards", kind: "n w5", down: true }, { by: "right", label: "right", title: "right samples, of those with a reward", kind: "n w6", down: true },
  { by: "tokens", label: "tokens", title: "response tokens: mean, least and most", kind: "n w8", down: true }, { by: "truncated", label: "cut off", title: "samples cut off at the length limit", kind: "n w5", down: true },
  { by: "staleness", label: "stale", title: "largest staleness, in versions", kind: "n w5", down: true }, { label: "prompt text", kind: "" },
];

// ---------------------------------------------------------------- samples

/** The stored samples: filters, distributions, a table of groups or of samples, one sample opened with its group. */
function samples() {
  const body = $("#samples .body"), spread = el("div", { class: "spread" }), place = el("div"), opened = el("div", { class: "opened" }), count = el("span", { class: "note", "aria-live": "polite" });
  const select = (name, options) => el("select", { name }, ...options.map(([value, label]) => el("option", { value }, label)));
  const whole = (name, label) => el("input", { name, type: "number", min: 0, "aria-label": label });
  const sets = [...new Set(Object.keys(run.columns).map((n) => /^eval\/(.+)\/[^/]+$/.exec(n)?.[1]).filter(Boolean))];
  const byColumn = el("option", { hidden: true }, "by a column"), more = el("div", { class: "tools" });
  const form = el("form", { class: "tools", submit: (event) => { event.preventDefault(); changed(); }, change: (event) => changed(event.target.name) },
    el("label", {}, "show ", select("show", [["groups", "groups"], ["samples", "samples"]])),
    el("label", {}, "order ", select("order", NAMED_ORDERS)),
    el("label", {}, "ended ", select("reason", [["", "in any way"], ...REASONS.map((reason) => [reason, ENDED[reason] || `reward: ${reason}`])])),
    el("label", {}, "steps ", whole("from", "first step"), " to ", whole("to", "last step")),
    el("label", {}, "tokens ", whole("shortest", "fewest response tokens"), " to ", whole("longest", "most response tokens")),
    el("label", {}, "prompt ", el("input", { name: "prompt", size: 10, placeholder: "number", "aria-label": "number of the prompt, or NAME:ROW of one of several data sets" })), el("input", { name: "epoch", type: "hidden" }),
    sets.length ? el("label", {}, "of ", select("eval", [["", "training"], ...sets.map((s) => [s, `evaluation ${visible(s, 40)}`])])) : null,
    el("label", {}, "right from ", el("input", { name: "right", type: "number", step: "any", "aria-label": "reward from which a sample is right", placeholder: number(config("eval.solved_reward") ?? 1) })),
    el("label", {}, el("input", { name: "dropped", type: "checkbox", value: 1 }), " dropped groups in distributions"),
    el("label", {}, "text ", el("input", { name: "grep", type: "search", placeholder: "regular expression" })), el("button", {}, "search"), count);
  form.elements.order.append(byColumn);
  let offset = 0, asked = 0;

  const showsGroups = () => form.elements.show.value === "groups";
  function changed(name) {
    if (name === "prompt") form.elements.epoch.value = "";
    if (name === "show" && !byColumn.hidden && form.elements.order.selectedOptions[0] === byColumn) form.elements.order.value = "newest";
    offset = 0;
    ask();
    if (!["show", "order"].includes(name)) distributions(spread, filters());
  }
  function filters() {
    const query = new URLSearchParams(new FormData(form));
    for (const [name, value] of [...query]) if (!value || ["show", "order"].includes(name)) query.delete(name);
    return query;
  }
  /** Sorts by the head of a column; the head keeps the focus. */
  async function sort(order) {
    const at = document.activeElement?.dataset?.by;
    byColumn.value = order;
    byColumn.hidden = false;
    form.elements.order.value = order;
    offset = 0;
    await ask();
    place.querySelector(`[data-by="${at}"]`)?.focus();
  }

  async function ask() {
    const ticket = ++asked, kind = showsGroups() ? "groups" : "samples", query = filters(), order = form.elements.order.value;
    query.delete("dropped");
    query.set("order", order); query.set("limit", PAGE); query.set("offset", offset);
    try {
      const answer = await get(`api/${kind}?${query}`), { total } = answer;
      if (ticket !== asked) return;
      const stored = run.info.files["samples.sqlite"] === "present" && config("samples.per_step") !== 0;
      if (!total && query.size <= 3 && !stored) return body.replaceChildren(note(why("samples", "samples.sqlite", "samples.per_step")));
      if (!form.isConnected) {
        body.replaceChildren(form, spread, place, more, opened);
        distributions.draw?.();
      }
      const last = offset + answer[kind].length, cut = known(answer.from_step) ? `; counted from step ${answer.from_step} on: name steps for earlier ones` : "";
      count.replaceChildren(total ? `${(offset + 1).toLocaleString("en")} to ${last.toLocaleString("en")} of ${total.toLocaleString("en")} ${kind}${cut}` : query.size <= 3 ? "No sample is stored yet." : `No ${kind === "groups" ? "group" : "sample"} is like that.`);
      const turn = (label, by) => { const at = offset + by, b = el("button", { type: "button", click: () => { offset = at; ask(); } }, label); b.disabled = at < 0 || at >= total; return b; };
      more.replaceChildren(...(total > PAGE ? [turn("before", -PAGE), turn("next", PAGE)] : []));
      if (kind === "groups") listGroups(answer.groups, order); else list(answer.samples, order);
    } catch (error) {
      if (ticket !== asked) return;
      count.replaceChildren(visible(error.message));
      if (form.isConnected) { place.replaceChildren(); more.replaceChildren(); } else body.replaceChildren(note(error.message));
    }
  }
  /** A row that acts on a click and on Enter. */
  function actingRow(cells, label, act) {
    const line = row(cells, { class: "open", tabindex: 0, "aria-label": label, click: () => act(line), keydown: (event) => { if (event.key === "Enter" && event.target === line) act(line); } });
    return line;
  }
  function choose(line, id) {
    for (const one of place.querySelectorAll("tr.chosen")) one.classList.remove("chosen");
    line.classList.add("chosen");
    open(id);
  }
  function list(found, order = form.elements.order.value) {
    place.replaceChildren(found.length ? sortedTable(SAMPLE_COLUMNS, found.map(sampleRow), order, sort, "samples") : "");
  }
  const numbersOf = (s) => [
    cell("reward", "n", number(s.reward)), cell("advantage", "n", number(s.advantage)), cell("parts", "", partsOf(s)), cell("tokens", "n", String(known(s.tokens) ? s.tokens : s.count)),
    cell("staleness", "n", String(s.staleness ?? "–")), endOf(s),
  ];
  function sampleRow(s) {
    const step = cell("step", "n", String(s.step)), prompt = cell("prompt", "", nameOf(s), s.rolled_back ? " (rolled back)" : "");
    return actingRow([step, prompt, ...numbersOf(s), clipped("prompt text", s.prompt_text), clipped("completion", s.completion)], `open sample ${s.id}`, (line) => choose(line, s.id));
  }

  // ---- groups

  function listGroups(found, order) {
    place.replaceChildren(found.length ? sortedTable(GROUP_COLUMNS, found.map(groupRow), order, sort, "samples groups") : "");
  }
  function groupRow(g) {
    const lengths = `${number(g.tokens)} (${g.least_tokens === g.most_tokens ? "all" : `${number(g.least_tokens)}–${number(g.most_tokens)}`})`;
    const line = actingRow([
      cell("step", "n", String(g.step)), cell("prompt", "", nameOf(g), g.is_rolled_back ? " (rolled back)" : ""), cell("reward", "n", number(g.reward)), cell("spread", "n", number(g.spread)),
      cell("right", "n", `${g.right} of ${g.scored}`), cell("tokens", "n", lengths), cell("truncated", "n", String(g.truncated)), cell("staleness", "n", String(g.staleness ?? "–")), clipped("prompt text", g.prompt_text),
    ], `samples of prompt ${nameOf(g)}`, () => (line.nextSibling?.classList?.contains("members") ? shut(line) : members(line, g)));
    line.setAttribute("aria-expanded", "false");
    return line;
  }
  function shut(line) {
    line.nextSibling.remove();
    line.setAttribute("aria-expanded", "false");
  }
  /** The samples of a group, below its row. */
  async function members(line, g, order = "member", from = 0) {
    const had = line.nextSibling?.classList?.contains("members"), inside = had ? line.nextSibling.firstChild : el("td", { colspan: GROUP_COLUMNS.length });
    if (!had) line.after(el("tr", { class: "members" }, inside));
    line.setAttribute("aria-expanded", "true");
    const at = inside.contains(document.activeElement) ? document.activeElement.dataset.by : undefined;
    const query = new URLSearchParams({ group: g.id, order, limit: MEMBERS, offset: from });
    if (g.eval_name) query.set("eval", g.eval_name);
    try {
      const { samples: found, total } = await get(`api/samples?${query}`);
      const rows = found.map((s) => actingRow([cell("member", "n", String(s.member)), ...numbersOf(s), clipped("completion", s.completion)], `open sample ${s.id}`, (of) => choose(of, s.id)));
      const turn = (label, by) => { const b = el("button", { type: "button", click: () => members(line, g, order, from + by) }, label); b.disabled = from + by < 0 || from + by >= total; return b; };
      const missing = total < g.size ? note(`${total} of the ${g.size} samples are in this file; flowrt watch on the run directory has them.`) : null;
      inside.replaceChildren(...[found.length ? sortedTable(MEMBER_COLUMNS, rows, order, (next) => members(line, g, next), "samples") : null, missing,
        total > MEMBERS ? el("div", { class: "tools" }, turn("before", -MEMBERS), turn("next", MEMBERS), `${from + 1} to ${from + found.length} of ${total}`) : null].filter(Boolean));
      if (at) inside.querySelector(`[data-by="${at}"]`)?.focus();
    } catch (error) { inside.replaceChildren(note(error.message)); }
  }

  // ---- one sample

  async function open(id) {
    let s;
    try { s = await get(`api/sample/${id}`); } catch (error) { return opened.replaceChildren(note(error.message)); }
    const facts = [
      ["sample", s.id], ["step", s.step], ["prompt", nameOf(s)], ["member", s.member], ["reward", number(s.reward)], ["parts", partsOf(s)],
      ["advantage", number(s.advantage)], ["ended", [s.finish, s.reason].filter(Boolean).join(", ")],
      ["versions", known(s.version_min) ? `${s.version_min} to ${s.version_max}` : ""],
      ["generated in", known(s.generate_s) ? duration(s.generate_s) : ""], ["rewarded in", known(s.reward_s) ? duration(s.reward_s) : ""],
    ].filter(([, value]) => !["", "–", undefined, null].includes(value));
    const hasTexts = Array.isArray(s.tokens) && s.tokens.some((t) => t.text !== null);
    const group = el("div"), life = el("div");
    opened.replaceChildren(el("div", { class: "card" },
      el("div", { class: "line" }, el("h3", {}, `Sample ${s.id}`), el("button", { type: "button", click: () => opened.replaceChildren() }, "close")),
      el("dl", { class: "legend line-list" }, ...facts.map(([n, v]) => el("div", {}, el("dt", {}, n), el("dd", {}, String(v))))),
      el("h3", {}, "Prompt"), complete(s.prompt_text), el("h3", {}, "Completion"), ...(hasTexts ? strip(s.tokens) : [complete(s.completion)]), group, life));
    opened.scrollIntoView({ block: "nearest" });
    try {
      const { samples: own, total } = await get(`api/samples?group=${s.id}&order=member&limit=${MEMBERS}${s.eval_name ? `&eval=${encodeURIComponent(s.eval_name)}` : ""}`);
      const title = `Its group, ${own.length < total ? `the first ${own.length} of ${total}` : own.length} samples side by side`;
      if (own.length > 1) group.replaceChildren(el("h3", {}, title), el("div", { class: "group", tabindex: 0 }, ...own.map((one) => el("div", {},
        note(key(one.id === s.id ? "s0" : "old"), `reward ${number(one.reward)} · ${one.tokens} tokens · ${one.finish || ""}`), el("pre", { tabindex: 0 }, one.completion)))));
    } catch { /* a group that is not stored is no fault */ }
    life.replaceChildren(...await lifeOf(s));
  }
  function complete(text) {
    const shown = el("pre", { tabindex: 0 }, visible(text ?? "", 2000)), all = String(text ?? "");
    const showAll = (event) => { shown.replaceChildren(visible(all, 200000)); event.target.remove(); };
    if (all.length <= 2000) return shown;
    return el("div", {}, shown, el("button", { type: "button", click: showAll }, `show all ${all.length.toLocaleString("en")} characters`));
  }
  /** Tokens coloured by log-probability, by the trainer's difference, or by version. */
  function strip(tokens) {
    const said = el("p", { class: "readout" }, "Point at a token for its numbers."), legend = el("p", { class: "legend" }), text = el("pre", { tabindex: 0 });
    const limits = { logprob: [-0.1, -0.5, -1, -2, -4], mismatch: [0.01, 0.05, 0.1, 0.3, 1] }, shown = tokens.slice(0, 6000);
    const versions = [...new Set(tokens.map((t) => t.version))];
    const level = {
      logprob: (t) => limits.logprob.filter((v) => t.logprob < v).length,
      mismatch: (t) => limits.mismatch.filter((v) => Math.abs(t.trainer_logprob - t.logprob) > v).length,
      version: (t) => versions.indexOf(t.version) % 6,
    };
    const names = {
      logprob: limits.logprob.map((v, i) => `${i ? "" : "likely: "}above ${v}`).concat("below -4"),
      mismatch: limits.mismatch.map((v) => `up to ${v}`).concat("above 1"),
      version: versions.slice(0, 6).map((v) => `version ${v}`),
    };
    const spans = shown.map((t, i) => el("span", { "data-i": i }, visible(t.text ?? `⟨${t.id}⟩`, 200)));
    const paint = (by) => {
      shown.forEach((t, i) => { spans[i].className = `l${level[by](t) || 0}`; });
      legend.replaceChildren(...names[by].map((n, i) => el("span", { class: `l${i % 6}` }, n)));
    };
    const options = [["logprob", "log-probability"], ["mismatch", "difference to the trainer"], ["version", "version"]];
    const choice = el("select", { "aria-label": "colour of tokens", change: () => paint(choice.value) }, ...options.map(([value, label]) => el("option", { value }, label)));
    if (!shown.some((t) => known(t.trainer_logprob))) choice.children[1].disabled = true;
    text.append(...spans);
    if (tokens.length > shown.length) text.append(` … ${tokens.length - shown.length} more tokens`);
    text.addEventListener("pointerover", (event) => {
      const t = shown[event.target.dataset?.i];
      if (!t) return;
      const numbers = `id ${t.id} · log-prob ${number(t.logprob)} of the rollout, ${number(t.trainer_logprob)} of the trainer · version ${t.version ?? "–"}`;
      said.replaceChildren(el("b", {}, JSON.stringify(visible(t.text ?? "", 40))), numbers);
    });
    paint("logprob");
    return [el("div", { class: "tools" }, el("label", {}, "colour by ", choice), legend), text, said];
  }
  samples.list = list;
  /** Shows the samples of one prompt, and no other filter. */
  samples.of = ({ epoch, prompt, name }) => {
    form.reset();
    form.elements.show.value = "samples";
    form.elements.epoch.value = epoch;
    form.elements.prompt.value = name ?? prompt;
    offset = 0;
    $("#samples").scrollIntoView();
    distributions(spread, filters());
    return ask();
  };
  samples.refresh = () => {
    if (offset || opened.childElementCount || place.querySelector(".members") || body.contains(document.activeElement)) return;
    ask();
    distributions(spread, filters());
  };
  distributions(spread, filters());
  return ask();
}

// ---------------------------------------------------------------- distributions

/** Histograms of the samples of a filter, mean rewards by length, and means by data set and by solve rate. */
async function distributions(place, query) {
  const ticket = distributions.asked = (distributions.asked || 0) + 1, text = query.toString();
  let answer;
  try { answer = await get(`api/distributions${text ? `?${text}` : ""}`); } catch (error) {
    answer = { error: error.message };
  }
  if (ticket !== distributions.asked) return;
  clearHistograms();
  distributions.draw = undefined;
  if (answer.error) return place.replaceChildren(note(answer.error));
  const n = answer.samples, plain = (value) => value.toLocaleString("en");
  if (!n) return place.replaceChildren(note("No distributions: no sample of a group that was stored and trained is like that."));
  const missing = answer.without_reward ? ` ${plain(answer.without_reward)} have no reward.` : "", early = known(answer.from_step) ? ` Earlier ones are not counted: name steps for them.` : "";
  const said = `${plain(n)} samples of ${query.get("eval") ? "versions" : "steps"} ${answer.steps.map(plain).join(" to ")}; ${percent(answer.truncated / n)} were cut off at the length limit.${missing}${early}`;
  const legend = el("p", { class: "legend" }, el("span", {}, key("s0"), "ended by themselves"), el("span", {}, key("s1"), "cut off at the length limit"));
  const cards = [
    ["Rewards", "samples by reward", (card) => bars(card, answer.reward, "reward", false)], ["Response lengths", "samples by tokens", (card) => bars(card, answer.tokens, "tokens", false)],
    ["Reward by length", "mean, over the number of samples", (card) => bars(card, answer.tokens, "tokens", true)],
  ].map(([title, unit, draw]) => {
    const card = el("div", { class: "card curve" }, el("h3", {}, title, el("small", {}, `  ${unit}`)));
    return { card, draw: () => draw(card) };
  });
  const means = [["By data set", "data set", answer.sets, "all samples of the filter"], ["By solve rate of the prompt", "solve rate", answer.solve_rates, `right: a reward from ${number(answer.right_from)} on; of all steps`]];
  const tables = means.filter(([title, , lines]) => lines.length > 1 || (lines.length && title !== "By data set")).map(([title, label, lines, how]) =>
    el("div", { class: "card" }, el("h3", {}, title, el("small", {}, `  ${how}`)), table([label, "prompts#", "samples#", "reward#", "right#", "", "tokens#", "cut off#"], lines.map(meansRow), "means")));
  place.replaceChildren(note(said), legend, el("div", { class: "grid" }, ...cards.map((one) => one.card)), el("div", { class: "grid wide" }, ...tables));
  distributions.draw = () => {
    if (!place.isConnected) return; // it is drawn when it has a size
    clearHistograms();
    for (const one of cards) histograms.push(one.draw());
  };
  distributions.draw();
}

const histograms = [];
function clearHistograms() { for (const one of histograms.splice(0)) one?.destroy(); }

function meansRow(of) {
  const bar = el("span", { class: "bar" });
  bar.style.width = `${100 * (of.right ?? 0)}%`;
  return row([of.name, right(of.prompts.toLocaleString("en")), right(of.samples.toLocaleString("en")), right(number(of.reward)), right(percent(of.right)), el("td", { class: "w5" }, bar), right(number(of.tokens)), right(percent(of.truncated))]);
}

/** Draws a histogram in a card: samples in bins, the truncated ones at the top; or mean rewards by bin over the counts. */
function bars(card, { edges, count, truncated, reward }, unit, ofRewards) {
  card.querySelector(".plot")?.remove();
  card.querySelector(".readout")?.remove();
  const plot = el("div", { class: "plot" }), readout = el("div", { class: "readout" });
  card.append(plot, readout);
  if (!count.length) return plot.append(note("No sample has a reward."));
  const centres = count.map((_, i) => (edges[i] + edges[i + 1]) / 2), single = edges.every((edge, i) => Number.isInteger(edge) && (!i || edge === edges[i - 1] + 1));
  const whole = edges.every(Number.isInteger);
  const name = (i) => (single ? number(edges[i]) : `${number(edges[i])} to ${number(whole ? edges[i + 1] - 1 : edges[i + 1])}`);
  const most = count.indexOf(Math.max(...count));
  function say(u) {
    const at = known(u.cursor.idx) ? u.cursor.idx : most;
    const parts = [`${known(u.cursor.idx) ? "" : "most: "}${unit} `, el("b", {}, name(at)), `${count[at].toLocaleString("en")} samples, `];
    readout.replaceChildren(...parts, ...(ofRewards ? ["mean reward ", el("b", {}, number(reward[at]))] : [`${percent(count[at] ? truncated[at] / count[at] : NaN)} cut off`]));
  }
  const shown = uPlot.paths.bars({ size: [0.88, 90] }), fill = (name) => ({ scale: "n", paths: shown, stroke: () => colour(name), fill: () => colour(name), width: 0, points: { show: false } });
  const rewards = { scale: "y", stroke: () => colour("s2"), width: 2, spanGaps: true, points: { show: true, size: 6, fill: () => colour("s2"), stroke: () => colour("s2") } };
  const few = single && count.length <= 14;
  const room = (u, low, high) => { const gap = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1; return known(low) ? [low < 0 ? low - gap : Math.min(0, low), high > 0 ? high + gap : 0] : [0, 1]; };
  const u = new uPlot({
    width: plot.clientWidth, height: plot.clientHeight, legend: { show: false }, series: [{}, ...(ofRewards ? [fill("line"), rewards] : [fill("s1"), fill("s0")])],
    scales: { x: { time: false, range: () => [edges[0], edges.at(-1)] }, n: { range: (_, low, high) => [0, (high || 1) * 1.06] }, y: { range: room } },
    axes: [
      { ...axis, size: 26, grid: { show: false }, ...(few ? { splits: () => centres, values: () => edges.slice(0, -1).map(number) } : { values: (_, at) => at.map(number) }) },
      { ...axis, size: 52, scale: ofRewards ? "y" : "n", ...(ofRewards ? {} : { incrs: COUNTS }), values: (_, at) => at.map(number) }],
    cursor: { drag: { x: false, y: false }, points: { show: false } }, hooks: { setCursor: [say] },
  }, [centres, ...(ofRewards ? [count, reward] : [count, count.map((all, i) => all - truncated[i])])], plot);
  say(u);
  return u;
}
