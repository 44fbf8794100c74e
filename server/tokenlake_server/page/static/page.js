// Asks the daemon for its state every two seconds while this page is seen, and shows it. All texts become text nodes.

import { Chart } from "./charts.js";
import { amount, clock, count, rate, share, span } from "./words.js";

const POLL_MS = 2000;
const RETRY_MS = 5000;
const ASK_MS = 8000;
/** Seconds after which the state that is shown is called old. */
const LATE_S = 6;
const STORED = `tokenlake token ${location.pathname}`;
const TOKENS = [
  { name: "supplied", label: "supplied by the pool" },
  { name: "had", label: "engines had" },
  { name: "missed", label: "computed" },
];
const BYTES = [
  { name: "sent", label: "sent" },
  { name: "received", label: "received" },
];
const CROWDED = 24;
/** Reasons of misses that one call shows, and characters of the detail of one. */
const REASONS = 3;
const DETAIL = 120;

const $ = (id) => document.getElementById(id);

/** An element with attributes and children; texts become text nodes. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Characters that are not seen or that change the direction of what follows: names may have them. */
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

function setText(element, text) {
  const seen = text.replace(UNSEEN, "\ufffd");
  if (element.textContent !== seen) element.textContent = seen;
}

/** Keep one child per item, by key: what has the focus or is selected stays. */
function keep(parent, items, keyOf, create, update) {
  const known = new Map([...parent.children].map((each) => [each.dataset.key, each]));
  let at = parent.firstElementChild;
  items.forEach((item, number) => {
    const key = `${keyOf(item, number)}`;
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  });
  for (const gone of known.values()) gone.remove();
}

// -- parts

/** A bar of parts, each a share of the whole and the name of its colour. */
function bar(parts, kind = "") {
  const made = make("div", { class: `bar ${kind}`, "aria-hidden": "true" });
  setBar(made, parts);
  return made;
}

function setBar(element, parts) {
  while (element.children.length < parts.length) element.append(make("i"));
  while (element.children.length > parts.length) element.lastChild.remove();
  parts.forEach(([part, name], at) => {
    element.children[at].className = name;
    element.children[at].style.width = `${Math.min(100, Math.max(0, 100 * (part || 0))).toFixed(2)}%`;
  });
}

/** A table: `columns` are { title, kind, text(row), parts(row), full(row) }. */
function table(element, columns, rows, keyOf, empty) {
  if (!element.tHead) {
    const head = make("tr");
    for (const column of columns) head.append(make("th", { scope: "col", class: column.kind ?? "" }, column.title));
    element.append(make("thead", {}, head), make("tbody"));
  }
  const body = element.tBodies[0];
  if (!rows.length) {
    if (body.dataset.empty !== empty) {
      body.replaceChildren(make("tr", { "data-key": "\0" }, make("td", { colspan: columns.length, class: "empty" }, empty)));
    }
    body.dataset.empty = empty;
    return;
  }
  if (body.dataset.empty) body.replaceChildren();
  body.dataset.empty = "";
  const create = () => {
    const row = make("tr");
    for (const column of columns) {
      row.append(make("td", { class: column.kind ?? "" }, ...(column.parts ? [bar([])] : [])));
    }
    return row;
  };
  keep(body, rows, keyOf, create, (row, item) => {
    columns.forEach((column, at) => {
      const cell = row.cells[at];
      if (column.parts) {
        setBar(cell.firstChild, column.parts(item));
        cell.firstChild.classList.toggle("full", column.full?.(item) ?? false);
      } else {
        setText(cell, column.text(item));
        if (column.kind?.includes("name")) cell.title = column.text(item);
      }
    });
  });
}

function legend(element, series) {
  const keys = series.map(({ name, label }) => make("span", { class: `key ${name}` }, `${label} `, make("b")));
  element.append(...keys, make("span", { class: "when" }));
}

// -- the state

let shown = null;
let token = "";
let answered = 0;
let leftS = Infinity;
let timer = 0;
let asking = null;

const charts = {};

function chart(id, legendId, series, options) {
  legend($(legendId), series);
  const point = (index) => {
    const made = charts[id];
    const at = index ?? made.times.length - 1;
    const words = series.map(({ label }, number) => {
      const value = made.times.length ? options.words(made.values[number][at]) : "–";
      setText($(legendId).children[number].querySelector("b"), value);
      return `${label} ${value}`;
    });
    const when = made.times.length ? clock(made.times[at]) : "";
    setText($(legendId).lastChild, index === null ? "" : when);
    const element = $(id);
    element.setAttribute("aria-valuemax", Math.max(0, made.times.length - 1));
    element.setAttribute("aria-valuenow", Math.max(0, at));
    element.setAttribute("aria-valuetext", `${when}: ${words.join(", ")}`);
  };
  charts[id] = new Chart($(id), series, { ...options, onPoint: point });
}

function showChart(id, times, values) {
  charts[id].show(times, values);
  charts[id].onPoint(charts[id].at);
}

function stats(state) {
  const { tokens, history } = state;
  const last = (name) => history[name].at(-1) ?? null;
  const now = ["supplied", "engine_had", "missed"].map(last);
  const sum = now[0] === null ? 0 : now.reduce((all, each) => all + each, 0);
  const problems = state.problems.length;
  const items = [
    ["Supplied by the pool", now[0] === null ? "–" : `${count(now[0])} tok/s`,
      now[0] === null ? "tokens per second" : `${share(now[0], sum)} of those asked now`],
    ["Supplied so far", share(tokens.supplied, tokens.asked), `${count(tokens.supplied)} of ${count(tokens.asked)} tokens`],
    ["Prefill saved", span(tokens.saved_prefill_s), `in ${span(state.uptime_s)}, as predicted`],
    ["Memory", share(state.used_bytes, state.memory_bytes), `${amount(state.used_bytes)} of ${amount(state.memory_bytes)}`],
    ["Engines", count(state.engines), `${count(state.processes)} processes, ${count(state.segments)} segments`],
    ["Problems", count(problems), problems ? "see below" : "none known to this node", problems ? "bad" : ""],
  ];
  const create = () => make("div", {}, make("dt"), make("dd"), make("dd", { class: "more" }));
  keep($("stats"), items, ([title]) => title, create, (element, [title, value, more, kind]) => {
    element.className = kind ?? "";
    [title, value, more].forEach((text, at) => setText(element.children[at], text));
  });
}

function measure(what) {
  return make("div", { class: "measure" }, make("span", { class: "what" }, what), make("span", { class: "figure" }), bar([]));
}

function nodes(state) {
  const crowded = state.nodes.length > CROWDED;
  $("main").classList.toggle("crowded", crowded);
  $("nodes").classList.toggle("many", crowded);
  $("nodes").tabIndex = 0;
  const lost = state.nodes.filter(isLost).length;
  const more = state.nodes_left_out ? `, ${state.nodes_left_out} more not shown` : "";
  setText($("cluster-note"), `${state.nodes.length + state.nodes_left_out} nodes, epoch ${state.epoch}` +
    `${lost ? `, ${lost} not connected` : ""}${more}`);
  const most = Math.max(1, ...state.nodes.map((each) => each.sent_bytes_per_s ?? 0));
  const create = () => {
    const title = make("div", { class: "title" }, make("span", { class: "name" }), make("span", { class: "state" }));
    const load = measure("sends");
    load.classList.add("load");
    return make("li", {}, title, make("div", { class: "place" }), measure("memory"), load, make("div", { class: "reason" }));
  };
  keep($("nodes"), state.nodes, (each) => each.name, create, (element, each) => {
    const [title, place, memory, load, reason] = element.children;
    const kind = isLost(each) ? "bad" : each.state === "this node" ? "here" : each.state === "connected" ? "" : "busy";
    element.className = `node ${kind}`;
    setText(title.children[0], each.name);
    title.children[0].title = each.name;
    setText(title.children[1], `${kind === "bad" ? "✕ " : ""}${crowded && (kind === "" || kind === "bad") ? "" : each.state}`);
    element.title = crowded ? `${each.name}: ${each.state}` : "";
    place.hidden = !each.location;
    setText(place, each.location);
    place.title = each.location;
    const known = each.used_share !== null;
    memory.hidden = load.hidden = !known;
    reason.hidden = known && !each.reason;
    setText(reason, `${crowded && kind === "bad" ? `${each.state} ` : ""}${span(each.for_s)}${each.reason ? `: ${each.reason}` : ""}`);
    reason.title = each.reason;
    if (!known) return;
    setBar(memory.children[2], [[each.used_share, "supplied"]]);
    const of = each.memory_bytes === null || crowded ? "" : ` of ${amount(each.memory_bytes)}`;
    setText(memory.children[1], `${share(each.used_share, 1)}${of}`);
    setBar(load.children[2], [[each.sent_bytes_per_s / most, "had"]]);
    setText(load.children[1], rate(each.sent_bytes_per_s));
  });
}

const isLost = (node) => node.state === "unreachable" || node.state === "refused" || node.used_share === null;

function links(state) {
  const most = Math.max(1, ...state.links.flatMap((each) => [each.sent_bytes, each.received_bytes]));
  table($("links"), [
    { title: "node", kind: "name", text: (each) => each.node },
    { title: "sent", kind: "number", text: (each) => rate(each.sent_bytes_per_s) },
    { title: "received", kind: "number", text: (each) => rate(each.received_bytes_per_s) },
    { title: "sent in all", kind: "number", text: (each) => amount(each.sent_bytes) },
    { title: "received", kind: "number", text: (each) => amount(each.received_bytes) },
    { title: "in all", kind: "bars rare", parts: (each) => [[each.sent_bytes / most / 2, "sent"], [each.received_bytes / most / 2, "received"]] },
  ], state.links, (each) => each.node, "no segment has come from another node or gone to one");
}

function prefixes(state) {
  const shared = state.prefixes.filter((each) => each.requests > 1);
  setText($("prefix-note"), `newest ${count(state.requests)} requests; ${count(state.alone)} share none`);
  const part = (each, tokens) => tokens / Math.max(1, each.asked_tokens);
  table($("prefixes"), [
    { title: "first segment", kind: "name", text: (each) => each.key.slice(0, 12) },
    { title: "tenant", kind: "name", text: (each) => each.tenant },
    { title: "requests", kind: "number", text: (each) => count(each.requests) },
    { title: "tokens", kind: "number rare", text: (each) => count(each.asked_tokens) },
    { title: "supplied", kind: "number", text: (each) => share(each.supplied_tokens, each.asked_tokens) },
    { title: "share", kind: "bars", parts: (each) => [[part(each, each.supplied_tokens), "supplied"], [part(each, each.engine_had_tokens), "had"]] },
  ], shared, (each) => `${each.tenant} ${each.key}`, "no two requests begin with the same segment");
}

function tenants(state) {
  const more = state.tenants_left_out ? `nearest to their quotas, ${count(state.tenants_left_out)} more not shown` : "memory against quota";
  setText($("tenant-note"), more);
  table($("tenants"), [
    { title: "tenant", kind: "name", text: (each) => each.name },
    { title: "of quota", kind: "bars", parts: (each) => [[each.used_bytes / each.quota_bytes, "supplied"]], full: (each) => each.used_bytes > 0.97 * each.quota_bytes },
    { title: "used", kind: "number", text: (each) => amount(each.used_bytes) },
    { title: "quota", kind: "number", text: (each) => amount(each.quota_bytes) },
    { title: "read", kind: "number rare", text: (each) => rate(each.read_bytes_per_s) },
    { title: "written", kind: "number rare", text: (each) => rate(each.written_bytes_per_s) },
  ], state.tenants, (each) => each.name, "no tenant");
}

function disks(state) {
  table($("disks"), [
    { title: "path", kind: "name", text: (each) => each.path },
    { title: "state", kind: "", text: (each) => each.state },
    { title: "of size", kind: "bars", parts: (each) => [[each.used_bytes / Math.max(1, each.capacity_bytes), "supplied"]] },
    { title: "used", kind: "number", text: (each) => amount(each.used_bytes) },
    { title: "size", kind: "number", text: (each) => amount(each.capacity_bytes) },
    { title: "segments", kind: "number rare", text: (each) => count(each.segments) },
    { title: "problem", kind: "problem", text: (each) => each.problem || (each.lost_segments ? `${count(each.lost_segments)} segments were lost at the start` : "") },
  ], state.disks, (each) => each.path, "no disk is set (setting disk)");
}

function why(call) {
  const found = call.explanation;
  if (!found) return "the node does not remember this request any more";
  const places = [found.here ? `${count(found.here)} here` : "", ...Object.entries(found.elsewhere).map(([place, tokens]) => `${count(tokens)} at ${place.replace(/,$/, "")}`)];
  const at = places.filter(Boolean).join(", ");
  const parts = [`${count(found.ideal)} tokens: ${count(found.supplied)} supplied${at ? ` (found ${at})` : ""}`];
  if (found.engine_had) parts.push(`the engine had ${count(found.engine_had)}`);
  if (found.held) parts.push(`${count(found.held)} still leased`);
  const missed = [...found.missed].sort((one, other) => other.tokens - one.tokens);
  for (const miss of missed.slice(0, REASONS)) {
    const detail = miss.detail.length > DETAIL ? `${miss.detail.slice(0, DETAIL)}…` : miss.detail;
    parts.push(`${count(miss.tokens)} missed: ${miss.reason.replaceAll("_", " ")}${detail ? ` (${detail})` : ""}`);
  }
  if (missed.length > REASONS) parts.push(`${missed.length - REASONS} more reasons: tokenlake explain`);
  return parts.join(" · ");
}

function calls(state) {
  const create = () => {
    const names = ["time", "what", "request", "ago"];
    const first = make("div", { class: "first" }, ...names.map((name) => make("span", { class: name })), bar([]));
    return make("li", {}, first, make("div", { class: "why" }));
  };
  const items = state.calls.length ? state.calls : [null];
  keep($("calls"), items, (each) => (each ? `${each.call} ${each.tenant} ${each.request}` : ""), create, (element, each) => {
    const [first, reason] = element.children;
    first.hidden = !each;
    setText(reason, each ? why(each) : "no call took any time");
    if (!each) return;
    const words = [span(each.seconds), each.call, `${each.request} of ${each.tenant}`, `${span(each.age_s)} ago`];
    words.forEach((text, at) => setText(first.children[at], text));
    first.children[2].title = each.request;
    const found = each.explanation;
    const of = Math.max(1, found?.ideal ?? 1);
    const missed = found ? found.missed.reduce((sum, miss) => sum + miss.tokens, 0) : 0;
    setBar(first.lastChild, found ? [[found.supplied / of, "supplied"], [found.engine_had / of, "had"], [missed / of, "missed"]] : []);
  });
}

function events(state) {
  const create = () => make("li", {}, make("time"), make("span"));
  keep($("events"), state.events, (each) => `${each.at_s} ${each.what} ${each.text.slice(0, 40)}`, create, (element, each) => {
    element.className = each.severity;
    setText(element.firstChild, clock(each.until_s));
    setText(element.lastChild, each.text);
  });
}

function problems(state) {
  $("problems").hidden = !state.problems.length;
  const create = () => make("li", {}, make("span"), make("span", { class: "cure" }));
  keep($("problem-list"), state.problems, (each) => each.what, create, (element, each) => {
    setText(element.firstChild, each.what);
    setText(element.lastChild, each.cure ? ` Cure: ${each.cure}` : "");
  });
}

function show(state) {
  shown = state;
  const only = state.tenant ? `, tenant ${state.tenant} only` : "";
  setText($("node"), `${state.node}`);
  setText($("facts"), `cluster ${state.cluster}, version ${state.version}, up ${span(state.uptime_s)}${only}`);
  document.title = `${state.problems.length ? "▲ " : ""}${state.node} · TokenLake`;
  $("gate").hidden = true;
  $("main").hidden = false;
  const { history } = state;
  stats(state);
  problems(state);
  showChart("token-chart", history.end_s, [history.supplied, history.engine_had, history.missed]);
  showChart("byte-chart", history.end_s, [history.sent, history.received]);
  for (const draw of [nodes, links, prefixes, tenants, disks, calls, events]) draw(state);
}

// -- asking

/** `state`: start, live, late, silent, expired, paused, none. */
function tell(state, word, banner = "") {
  document.body.dataset.state = state;
  setText($("word"), word);
  if (banner !== $("banner").textContent) setText($("banner"), banner);
  $("banner").hidden = !banner;
}

const since = () => (shown ? ` What you see is of ${clock(shown.made_s)}.` : "");

function gate(banner) {
  if (!shown) $("gate").hidden = false;
  tell(shown ? "expired" : "none", shown ? "token expired" : "no token", banner);
}

function refused(reason) {
  sessionStorage.removeItem(STORED);
  token = "";
  gate(`${reason[0].toUpperCase()}${reason.slice(1)}.${since()}`);
}

function later(milliseconds) {
  clearTimeout(timer);
  if (token && !document.hidden) timer = setTimeout(ask, milliseconds);
}

async function ask() {
  clearTimeout(timer);
  if (!token || asking) return;
  asking = new AbortController();
  const late = setTimeout(() => asking?.abort(), ASK_MS);
  let wait = RETRY_MS;
  try {
    const headers = { Authorization: `Bearer ${token}` };
    const options = { headers, cache: "no-store", credentials: "omit", redirect: "error", signal: asking.signal };
    const answer = await fetch("page.json", options);
    const body = await answer.json();
    if (answer.status === 401) {
      refused(body.error);
    } else if (!answer.ok) {
      tell("silent", "not answered", `${body.error}.${since()}`);
    } else {
      answered = performance.now();
      leftS = Number(answer.headers.get("Token-Expires-In") ?? Infinity);
      show(body);
      live();
      wait = POLL_MS;
    }
  } catch (error) {
    if (error instanceof TypeError || error instanceof SyntaxError || error.name === "AbortError") {
      const what = error.name === "AbortError" ? `does not answer within ${ASK_MS / 1000} s` : "does not answer";
      tell("silent", "no answer", `The node ${what}; trying again every ${RETRY_MS / 1000} s.${since()}`);
    } else {
      tell("silent", "page failed", `The page cannot show what the node answered: ${error.message}.${since()}`);
      console.error(error);
    }
  } finally {
    clearTimeout(late);
    asking = null;
  }
  later(wait);
}

function live() {
  const soon = leftS < 600 ? `The token expires in ${span(leftS)}; \`tokenlake page\` prints an address with a new one.` : "";
  tell("live", `live ${clock(shown.made_s)}`, soon);
}

/** Say how old the state is while an answer is late. */
function age() {
  if (document.body.dataset.state !== "live" && document.body.dataset.state !== "late") return;
  const seconds = (performance.now() - answered) / 1000;
  if (seconds > LATE_S) tell("late", `${seconds.toFixed(0)} s old`, `The node has not answered for ${seconds.toFixed(0)} s.${since()}`);
}

function arrive() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(STORED, given);
    // The token stays out of the history, of bookmarks, and of what is copied from the address bar.
    history.replaceState(null, "", location.pathname + location.search);
  }
  token = given ?? sessionStorage.getItem(STORED) ?? "";
  if (!token) gate("");
  else ask();
}

chart("token-chart", "token-legend", TOKENS, { stacked: true, base: 10, text: count, words: (value) => `${count(value)} tok/s` });
chart("byte-chart", "byte-legend", BYTES, { stacked: false, base: 1024, text: rate, words: rate });
window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) arrive();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else ask();
});
setInterval(age, 1000);
arrive();
