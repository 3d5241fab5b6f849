"use strict";
// The page: asks the query endpoint, shows tables and histograms. Everything shown is set as text, never as markup.

const main = document.getElementById("main");
const state = document.getElementById("state");
const runSelect = document.getElementById("run");
let view = location.hash.slice(1) || "runs";
let timer = 0;
let selected = -1;

const el = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return node;
};

const quote = (text) => "'" + String(text).replaceAll("\\", "\\\\").replaceAll("'", "\\'") + "'";
const inRun = (word = "WHERE") => (runSelect.value ? ` ${word} run = ${quote(runSelect.value)}` : "");

async function ask(sql) {
  const answer = await fetch("v1/query", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ sql }),
  });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ? body.error.message : answer.statusText);
  return body;
}

const shown = (value) => {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number" && !Number.isInteger(value)) return value.toPrecision(3);
  if (typeof value === "number") return value.toLocaleString("en");
  if (typeof value === "string" && value.startsWith("1970-01-01")) return "–";
  if (typeof value === "object") return JSON.stringify(value);
  return String(value);
};

const TONE = { passed: "good", completed: "good", failed: "bad", harness_error: "bad", infra_error: "warn", cancelled: "warn" };

function table({ columns, rows }, open) {
  if (!rows.length) return el("p", { class: "empty" }, "Nothing yet.");
  const numeric = columns.map((_, i) => rows.some((r) => typeof r[i] === "number"));
  const head = el("tr", {}, ...columns.map((c, i) => el("th", { scope: "col", class: numeric[i] ? "n" : null }, c)));
  const body = rows.map((row) =>
    el(
      "tr",
      open ? { class: "open", tabindex: "0", onclick: () => open(row), onkeydown: (e) => e.key === "Enter" && open(row) } : {},
      ...row.map((value, i) => el("td", { class: (numeric[i] ? "n " : "") + (TONE[value] || "") }, shown(value))),
    ),
  );
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

function histogram(values, label) {
  if (!values.length) return el("p", { class: "empty" }, "Nothing yet.");
  const low = Math.min(...values), high = Math.max(...values), bins = Math.min(20, new Set(values).size);
  const counts = new Array(bins).fill(0);
  for (const v of values) counts[high === low ? 0 : Math.min(bins - 1, Math.floor(((v - low) / (high - low)) * bins))]++;
  const top = Math.max(...counts), width = 560, height = 140, step = width / bins;
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height + 20}`);
  svg.setAttribute("width", width);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${label}: ${values.length} values from ${shown(low)} to ${shown(high)}`);
  counts.forEach((count, i) => {
    const bar = document.createElementNS(space, "rect");
    const size = (count / top) * (height - 16);
    for (const [k, v] of Object.entries({ x: i * step + 1, y: height - size, width: Math.max(1, step - 2), height: size })) bar.setAttribute(k, v);
    svg.append(bar);
    if (count) svg.append(svgText(space, i * step + step / 2, height - size - 3, count, "middle"));
  });
  svg.append(svgText(space, 0, height + 14, shown(low), "start"), svgText(space, width, height + 14, shown(high), "end"));
  return svg;
}

function svgText(space, x, y, text, anchor) {
  const node = document.createElementNS(space, "text");
  for (const [k, v] of Object.entries({ x, y, "text-anchor": anchor })) node.setAttribute(k, v);
  node.textContent = String(text);
  return node;
}

const card = (name, value) => el("div", { class: "card" }, el("b", {}, shown(value)), el("span", {}, name));
const section = (title, about, ...nodes) => [el("h2", {}, title), about ? el("p", { class: "about" }, about) : null, ...nodes];
const numbers = ({ rows }, at = 0) => rows.map((r) => r[at]).filter((v) => typeof v === "number");

const views = {
  async runs() {
    const totals = await ask(`SELECT count(), countIf(state IN ('completed','failed','cancelled')), countIf(state = 'running'),
      avgIf(reward, has_reward = 1), sum(traces) FROM sessions${inRun()}`);
    const [all, ended, running, reward, traces] = totals.rows[0];
    const runs = await ask(`SELECT run, count() AS sessions, countIf(state NOT IN ('completed','failed','cancelled')) AS live,
      countIf(outcome = 'passed') AS passed, avgIf(reward, has_reward = 1) AS mean_reward, sum(traces) AS traces,
      sum(exact_spans) AS exact, sum(drifted_spans) AS drifted, max(ended) AS last FROM sessions${inRun()} GROUP BY run ORDER BY max(accepted) DESC LIMIT 100`);
    const outcomes = await ask(`SELECT outcome, sum(sessions) AS sessions, sum(attempts) AS attempts, avg(mean_run_s) AS mean_run_s
      FROM outcomes${inRun()} GROUP BY outcome ORDER BY sessions DESC`);
    return [
      el("div", { class: "cards" }, card("sessions", all), card("ended", ended), card("running", running), card("mean reward", reward), card("traces", traces)),
      ...section("Runs", "", table(runs, (row) => { runSelect.value = row[0]; go("sessions"); })),
      ...section("Outcomes", "Infrastructure faults are never a reward of 0.", table(outcomes)),
    ];
  },
  async sessions() {
    const found = await ask(`SELECT session, task, harness, state, outcome, reward, attempts, traces, sampled_tokens, run_s, accepted
      FROM sessions${inRun()} ORDER BY accepted DESC LIMIT 300`);
    return section("Sessions", "Newest first; Enter or a click opens one.", table(found, (row) => go("session/" + row[0])));
  },
  async session(id) {
    const where = `WHERE session = ${quote(id)}`;
    const calls = await ask(`SELECT completion, attempt, kind, dialect, stream, prompt_tokens, sampled_tokens, finish, chain_class,
      parent, context_exact AS exact, context_faithful AS faithful, untrainable, version, ttft_s, duration_s, reason
      FROM completions FINAL ${where} ORDER BY seq`);
    const tries = await ask(`SELECT attempt, max(a.gateway) AS gateway, max(a.end) AS end, max(a.exit_code) AS exit_code, max(a.fault) AS fault,
      max(a.cause) AS cause, max(a.detail) AS detail, max(a.run_s) AS run_s FROM attempts AS a ${where} GROUP BY attempt ORDER BY attempt`);
    const traces = await fetch(`v1/traces/${encodeURIComponent(id)}`).then((r) => (r.ok ? r.json() : { traces: [] }));
    return [
      ...section("Session " + id, "", el("button", { onclick: () => history.back() }, "← back")),
      ...section("Attempts", "", table(tries)),
      ...section("Completions", "", table(calls)),
      ...traces.traces.flatMap((t) => section(`Trace ${t.number}`, `${t.trace_id} · ${t.action_tokens} trained tokens · ${t.chain_class}`, tokens(t))),
    ];
  },
  async rewards() {
    const values = await ask(`SELECT reward FROM sessions WHERE has_reward = 1${inRun("AND")} LIMIT 10000`);
    const groups = await ask(`SELECT task, harness, sessions, mean_reward, spread, pass_share FROM reward_distribution${inRun()} ORDER BY spread DESC LIMIT 200`);
    return [...section("Rewards", "", histogram(numbers(values), "reward")), ...section("By task", "A group without spread teaches nothing.", table(groups))];
  },
  async policy() {
    const ages = await ask(`SELECT age FROM policy_age${inRun()} LIMIT 10000`);
    const used = await ask("SELECT age, count() AS traces, uniqExact(session) AS sessions FROM policy_age_consumed GROUP BY age ORDER BY age");
    const versions = await ask("SELECT version, policy_seq, kind, replica, time FROM policies FINAL ORDER BY seq DESC LIMIT 100");
    return [
      ...section("Policy age at sampling", "Versions published beyond the one that sampled.", histogram(numbers(ages), "policy age")),
      ...section("At consumption", "The trainer's version minus the oldest in the trace.", table(used)),
      ...section("Versions", "", table(versions)),
    ];
  },
  async length() {
    const found = await ask(`SELECT completions, sampled_tokens, total_s FROM session_length${inRun()} LIMIT 10000`);
    return [
      ...section("Model calls per session", "", histogram(numbers(found, 0), "calls")),
      ...section("Sampled tokens per session", "", histogram(numbers(found, 1), "tokens")),
      ...section("Seconds per session", "", histogram(numbers(found, 2), "seconds")),
    ];
  },
  async sql() {
    const box = el("textarea", { "aria-label": "SQL", spellcheck: "false" });
    box.value = localStorage.getItem("sql") || "SELECT harness, outcome, count() AS sessions, avg(reward) AS reward\nFROM sessions GROUP BY harness, outcome";
    const out = el("div");
    const send = async () => {
      localStorage.setItem("sql", box.value);
      try { out.replaceChildren(table(await ask(box.value))); } catch (error) { out.replaceChildren(el("pre", { class: "bad" }, error.message)); }
    };
    box.addEventListener("keydown", (e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && send());
    return [...section("SQL", "Read-only. Ctrl-Enter runs it.", box, el("button", { onclick: send }, "Run")), out];
  },
};

function tokens(trace) {
  const box = el("div", { class: "tokens" });
  trace.tokens.forEach((t) => {
    const kind = t.source === "prompt" ? "p" : t.mask ? "a" : "c";
    const about = `${t.id}${t.mask ? ` · log-prob ${t.logprob.toFixed(3)} · ${t.version || ""}` : ` · ${t.source}`}`;
    box.append(el("i", { class: kind + (t.drifted ? " d" : ""), title: about }, t.text));
  });
  return box;
}

function go(where) { location.hash = where; }

async function show() {
  clearTimeout(timer);
  view = location.hash.slice(1) || "runs";
  const [name, id] = view.split("/");
  for (const button of document.querySelectorAll("nav button"))
    button.setAttribute("aria-current", button.dataset.view === name ? "page" : "false");
  state.textContent = "loading";
  try {
    main.replaceChildren(...(await (views[name] || views.runs)(id)).filter(Boolean));
    state.textContent = new Date().toLocaleTimeString();
  } catch (error) {
    main.replaceChildren(el("pre", { class: "bad" }, error.message));
    state.textContent = "failed";
  }
  selected = -1;
  if (name !== "sql" && name !== "session") timer = setTimeout(show, 5000);
}

async function fillRuns() {
  const { rows } = await ask("SELECT DISTINCT run FROM sessions ORDER BY run LIMIT 500");
  const kept = runSelect.value;
  runSelect.replaceChildren(el("option", { value: "" }, "all"), ...rows.map(([run]) => el("option", { value: run }, run)));
  runSelect.value = kept;
}

document.querySelectorAll("nav button").forEach((b) => b.addEventListener("click", () => go(b.dataset.view)));
runSelect.addEventListener("change", show);
addEventListener("hashchange", show);
addEventListener("keydown", (event) => {
  if (["TEXTAREA", "SELECT", "INPUT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey) return;
  const buttons = [...document.querySelectorAll("nav button")], rows = [...main.querySelectorAll("tr.open")];
  if (event.key >= "1" && event.key <= String(buttons.length)) buttons[event.key - 1].click();
  else if (event.key === "r") show();
  else if (event.key === "Escape") history.back();
  else if ((event.key === "j" || event.key === "k") && rows.length) {
    selected = Math.max(0, Math.min(rows.length - 1, selected + (event.key === "j" ? 1 : -1)));
    rows[selected].focus();
  }
});
fillRuns().catch(() => {});
show();
