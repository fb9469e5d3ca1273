// The admin page. The process sends an overview every second (/events); tables that may be long are asked for by pages.
"use strict";

const $ = (id) => document.getElementById(id);

// Make an element: attributes, then children. Texts are set as texts, never parsed.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null).map((each) => each instanceof Node ? each : String(each)));
  return element;
}

// Numbers in words

const count = (value) => value === undefined || value === null ? "–" : value.toLocaleString("en");
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]);
function scaled(value, units) {
  if (value === undefined || value === null) return "–";
  let power = 0;
  while (value >= 1000 && power < units.length - 1) { value /= 1000; power += 1; }
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} ${units[power]}`;
}
const rate = (value) => value === undefined || value === null ? "–" : value >= 100 ? count(Math.round(value)) : value.toFixed(1).replace(/\.0$/, "");
const millis = (value) => value === undefined || value === null ? "–" : value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
const clock = (at) => new Date(at).toLocaleTimeString("en-GB");
function ago(at) {
  const seconds = Math.max(0, Math.round((now() - at) / 1000));
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${seconds} s`;
}
const now = () => state.overview ? state.overview.at + (Date.now() - state.heard) : Date.now();
const admin = () => {
  const place = location.protocol === "https:" ? `https://${location.host}` : location.host;
  return place === "127.0.0.1:9644" ? "" : ` --admin ${place}`;
};
const tag = (level, text) => h("span", { class: `tag ${level}` }, text);

// A table: columns have a heading, the cell of a row, and a class. Rows are replaced, so nothing in them takes the focus.
function table(name, columns, empty) {
  const body = h("tbody");
  const head = h("thead", {}, h("tr", {}, ...columns.map((each) => h("th", { scope: "col", class: each.class ?? "" }, each.heading))));
  const element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, h("table", {}, head, body));
  element.say = (words) => body.replaceChildren(h("tr", {}, h("td", { colspan: columns.length, class: "wrap muted" }, words)));
  element.show = (rows) => rows.length ? body.replaceChildren(...rows.map((row) => h("tr", {}, ...columns.map((each) => {
    const cell = each.cell(row);
    const zero = cell === 0 || cell === "0" || cell === "–" ? " zero" : "";
    return h("td", { class: `${each.class ?? ""}${zero}`, "data-label": each.heading }, cell);
  })))) : element.say(empty);
  return element;
}
function section(title, explains, twin, command, ...content) {
  return h("section", { "aria-label": title }, h("h2", {}, title), explains ? h("p", { class: "muted" }, explains) : undefined, ...content,
    h("p", { class: "muted same" }, h("span", {}, "As JSON: ", h("a", { href: twin }, twin)), h("span", {}, "In a terminal: ", h("code", {}, `${command}${admin()}`))));
}
const number = (heading, cell) => ({ heading, cell, class: "n" });
const text = (heading, cell) => ({ heading, cell });
const wide = (heading, cell) => ({ heading, cell, class: "wide" });

// The parts of the overview. Each returns a section with `update(overview)`, or nothing if the process has no such thing.

const LEVELS = { up: "good", slow: "warn", down: "bad", hung: "bad", gone: "warn" };

function brokers(overview) {
  const isProxy = overview.kind === "proxy";
  const shown = table("Brokers", [
    number("broker", (each) => each.id),
    wide("address", (each) => h("span", {}, each.address || "–", each.this ? " (this one)" : "")),
    text("state", (each) => tag(LEVELS[each.state], each.state)),
    number("partitions", (each) => count(each.partitions)),
    ...(isProxy ? [
      number("produce/s", (each) => rate(each.requests)),
      number("latency", (each) => each.state === "slow" ? tag("warn", millis(each.latency_ms)) : millis(each.latency_ms)),
      number("99 % below", (each) => millis(each.slowest_ms)),
      number("in flight", (each) => count(each.in_flight)),
      number("oldest", (each) => each.oldest_s ? `${each.oldest_s.toFixed(1)} s` : "–"),
      number("errors/min", (each) => each.errors ? h("span", { class: "tag warn" }, count(each.errors)) : 0),
    ] : []),
    number("connections", (each) => count(each.connections)),
    ...(overview.brokers.some((each) => each.lacking !== undefined) ? [number("not in sync", (each) => each.lacking ? h("span", { class: "tag warn" }, count(each.lacking)) : count(each.lacking ?? 0))] : []),
  ], "No broker is known.");
  const more = h("p", { class: "muted" });
  const explains = isProxy ? "Latency is from the hand-over of a produce request to the broker's answer, over the last 10 s." : "The cluster as this broker sees it in etcd.";
  const element = section("Brokers", explains, "/overview", "kproxy top", shown, more);
  element.update = (latest) => {
    shown.show(latest.brokers);
    const left = latest.brokers_total - latest.brokers.filter((each) => each.state !== "gone").length;
    more.textContent = left > 0 ? `and ${count(left)} more; those in trouble are shown first` : "";
  };
  return element;
}
function workers(overview) {
  if (!overview.workers) return undefined;
  const shown = table("Workers", [
    number("worker", (each) => each.number), text("state", (each) => tag(each.level, each.level === "good" ? "ready" : each.level === "warn" ? "degraded" : "not ready")),
    number("clients", (each) => count(each.clients)), number("restarts", (each) => count(each.restarts)), { heading: "says", cell: (each) => each.text, class: "wrap" },
  ], "");
  const element = section("Workers", "Processes that share the port.", "/overview", "kproxy top", shown);
  element.update = (latest) => shown.show(latest.workers ?? []);
  return element;
}
function proxies(overview) {
  if (!overview.proxies) return undefined;
  const shown = table("Proxies", [number("id", (each) => each.id), wide("address for clients", (each) => h("span", {}, each.address, each.this ? " (this one)" : ""))], "No proxy is registered.");
  const element = section("Proxies that clients see", "", "/overview", "kproxy table", shown);
  element.update = (latest) => shown.show(latest.proxies ?? []);
  return element;
}
function limits(overview) {
  if (!overview.limits) return undefined;
  const size = (line, value) => line.unit === "B" ? bytes(value) : count(value);
  const shown = table("Limits", [
    wide("limit", (each) => each.name), number("used", (each) => size(each, each.used)), number("of", (each) => size(each, each.limit)),
    wide("share", (each) => h("span", {}, h("meter", { min: 0, max: each.limit, low: 0.7 * each.limit, high: 0.9 * each.limit, optimum: 0, value: each.used, "aria-label": each.name }), ` ${Math.round(100 * each.used / each.limit)} %`)),
    wide("key", (each) => h("code", {}, each.key)),
  ], "");
  const element = section("Limits beside their use", "", "/overview", "kproxy top --view limits", shown);
  element.update = (latest) => shown.show(latest.limits ?? []);
  return element;
}
function facts() {
  const list = h("dl", { class: "facts" });
  const element = h("section", { "aria-label": "Facts" }, h("h2", {}, "More"), list);
  element.update = (latest) => list.replaceChildren(...Object.entries(latest.facts).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  return element;
}
function timeline(most) {
  const list = h("ol", { class: "timeline" });
  const explains = "Moves, retries, errors, reloads, denials and the like, the newest first. The same again within a minute is one line.";
  const element = section("What changed lately", explains, "/overview", "kproxy top --view lately", list);
  element.update = (latest) => list.replaceChildren(...(latest.events.length ? latest.events.slice(0, most).map((each) => h("li", {},
    h("time", { datetime: new Date(each.at).toISOString(), title: new Date(each.at).toString() }, clock(each.at)), h("span", {}, tag(each.level, each.kind)),
    h("span", {}, each.count > 1 ? `${count(each.count)} × ` : "", each.text),
    h("span", { class: "muted" }, each.at - each.since > 1500 ? `since ${clock(each.since)}` : ""),
  )) : [h("li", {}, h("span", { class: "muted" }, "–"), h("span"), h("span", { class: "muted" }, `nothing since ${clock(latest.started)}`), h("span"))]));
  return element;
}

// Tables by pages. `path(cursor)` is the address of a page, `read` returns its rows and the cursor of the next page.

function paged(title, explains, twin, command, shown, tools, path, read) {
  const note = h("span", { class: "muted", role: "status" });
  const [before, after] = ["Previous", "Next"].map((name) => h("button", { type: "button", disabled: true }, name));
  const element = section(title, explains, twin, command, h("div", { class: "tools" }, ...tools, before, after, note), shown);
  let cursors = [undefined], next, asked = 0, waiting = 0, ticks = 0;
  shown.say("Loading…");
  element.refresh = async () => {
    const mine = ++asked;
    waiting += 1;
    const answer = await ask(path(cursors.at(-1)));
    waiting -= 1;
    if (mine !== asked || !element.isConnected) return;
    if (typeof answer === "string") { note.textContent = answer; return; }
    const page = read(answer, cursors.at(-1));
    next = page.next;
    shown.show(page.rows, page.page);
    note.textContent = page.note;
    before.disabled = cursors.length === 1;
    after.disabled = next === undefined || next === null;
  };
  element.restart = () => { cursors = [undefined]; return element.refresh(); };
  after.addEventListener("click", () => { cursors.push(next); element.refresh(); });
  before.addEventListener("click", () => { cursors.pop(); element.refresh(); });
  element.update = () => { if (++ticks % 2 === 0 && !waiting) element.refresh(); };
  let waits;
  for (const tool of tools) for (const event of ["input", "change"]) {
    tool.addEventListener(event, () => { clearTimeout(waits); waits = setTimeout(element.restart, 200); });
  }
  return element;
}
const field = (label, placeholder) => h("input", { type: "search", "aria-label": label, placeholder });
const choice = (label, options) => h("select", { "aria-label": label }, ...options.map(([value, name]) => h("option", { value }, name)));
const query = (path, fields) => `${path}?${new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== undefined && value !== ""))}`;

function partitions(overview) {
  const search = field("Search topics", "topic or topic/partition");
  const owner = choice("Owner", [["", "any owner"], ...overview.brokers.map((each) => [each.id, `broker ${each.id}`]), ["-1", "nobody"]]);
  const isProxy = overview.kind === "proxy";
  const inSync = (each) => {
    if (!each.isr) return "–";
    const missing = each.replicas.filter((id) => !each.isr.includes(id));
    const words = `${each.isr.join(", ")}${missing.length ? ` without ${missing.join(", ")}` : ""}`;
    return missing.length ? tag(each.isr.length < (each.min_insync_replicas ?? 0) ? "bad" : "warn", words) : words;
  };
  const shown = table("Partitions", [
    { heading: "topic", cell: (each) => each.topic, class: "wrap" }, { heading: "partition", cell: (each) => each.partition, class: "n id" }, number("owner", (each) => each.owner < 0 ? tag("bad", "nobody") : each.owner),
    ...(isProxy ? [wide("since", (each) => each.since ? `${clock(each.since)} (${ago(each.since)} ago)` : "the start"), number("moves", (each) => each.moves ?? 0)] : []),
    number("revision", (each) => each.revision), text("in sync", inSync),
  ], "No partition matches.");
  return paged("Partitions", "", "/partitions", isProxy ? "kproxy table" : "kproxy top --view partitions", shown, [search, owner],
    (after) => query("/partitions", { search: search.value.trim(), owner: owner.value, after, limit: 50 }),
    (page) => ({ rows: page.partitions, next: page.next, note: `${count(page.partitions.length)} of ${count(state.overview.partitions)} shown` }));
}

// The first topics or clients in an order: a page begins after `skip` rows.

function firsts(title, path, explains, command, shown, [label, placeholder], orders, names) {
  const search = field(label, placeholder), order = choice("Order", orders), size = 50;
  return paged(title, explains, path, command, shown, [search, order],
    (skip) => query(path, { order: order.value, search: search.value.trim(), skip: skip ?? 0, limit: size }),
    (page, skip) => {
      const rows = page[path.slice(1)], first = skip ?? 0, last = first + rows.length;
      const next = rows.length === size && last < Math.min(page.total, 1000) ? last : undefined;
      return { rows, next, note: `${count(first + Math.min(1, rows.length))} to ${count(last)} of ${count(page.total)} ${names}`, page };
    });
}
function topics() {
  const owners = (each) => [...Object.entries(each.owners).map(([id, owned]) => `broker ${id} (${count(owned)})`),
    ...(each.partitions > each.unowned + Object.values(each.owners).reduce((sum, owned) => sum + owned, 0) ? ["…"] : []),
  ].join(", ");
  const shown = table("Topics", [
    { heading: "topic", cell: (each) => each.topic, class: "wrap" }, number("partitions", (each) => count(each.partitions)),
    { heading: "owners (partitions)", class: "wrap", cell: (each) => h("span", {}, owners(each), " ", each.unowned ? tag("bad", `nobody (${count(each.unowned)})`) : "") },
    number("produce/s", (each) => rate(each.requests)), number("received/s", (each) => bytes(each.received_bytes)),
    number("busiest partition", (each) => each.busiest == null || each.partitions < 2 ? "–" : `${each.busiest}: ${Math.floor(100 * each.busiest_bytes / each.received_bytes)} %`),
    number("moves", (each) => count(each.moves)), number("errors", (each) => each.errors ? h("span", { class: "tag warn" }, count(each.errors)) : 0),
  ], "No topic matches.");
  const off = h("p", { class: "hint", hidden: true }, "Requests and bytes of topics are not counted. ", h("code", {}, "kproxy serve --metrics-topics 100"),
    " counts them and names the 100 busiest on /metrics; in the configuration it is ", h("code", {}, "metrics.topics = 100"), ".");
  const whole = h("div", {}, off, shown);
  whole.say = shown.say;
  whole.show = (rows, page) => { off.hidden = page.is_counted; shown.show(rows); };
  return firsts("Topics", "/topics", "Produce requests and their bytes are of the last seconds. Moves (a partition gets another owner) and errors (a partition is answered with one) are since the start.",
    "kproxy top --view topics", whole, ["Search topics", "topic"],
    [["rate", "the busiest first"], ["moves", "most moves first"], ["errors", "most errors first"], ["name", "by name"]], "topics");
}
function clients(overview) {
  const shown = table("Clients", [
    { heading: "client id", cell: (each) => each.client_id || "–", class: "wrap" }, { heading: "software", cell: (each) => each.software || "–", class: "wrap" }, text("principal", (each) => each.principal || "–"), wide("address", (each) => each.address),
    number("requests/s", (each) => rate(each.requests)), number("received/s", (each) => bytes(each.received_bytes)), number("sent/s", (each) => bytes(each.sent_bytes)), number("in flight", (each) => count(each.in_flight)),
    number("oldest request", (each) => each.oldest_s ? h("span", { class: each.oldest_s >= 1 ? "tag warn" : "" }, `${each.oldest_s.toFixed(1)} s at broker ${each.oldest_at}`) : "–"),
    number("slow", (each) => each.slow_s ? h("span", { class: each.slow_s >= 1 ? "tag warn" : "" }, `${each.slow_s.toFixed(1)} s ${each.slow_at}`) : "–"),
    number("connected", (each) => ago(each.since)), ...(overview.workers ? [number("worker", (each) => each.worker)] : []),
  ], "No client matches.");
  return firsts("Clients", "/clients", "A client is slow while it keeps the proxy waiting: it is still sending a request, or is not reading its answers.",
    "kproxy top --view clients", shown, ["Search clients", "id, software, principal, address"],
    [["rate", "the busiest first"], ["oldest", "the oldest request first"], ["slow", "the slowest first"]], "connections");
}
function claims() {
  const group = field("Group", "the whole name of a group");
  const shown = table("Claims", [
    text("group", (each) => each.group), { heading: "resource", cell: (each) => each.resource || "(whole group)", class: "wrap" }, number("generation", (each) => each.generation), number("fence", (each) => each.fence),
    text("client", (each) => each.client || "–"), text("at proxy", (each) => each.address || each.proxy), number("held for", (each) => ago(each.since)),
  ], "Nobody has a claim.");
  return paged("Claims", "Partitions that single writers have claimed by the Own API.", "/own", "kproxy own list", shown, [group],
    (after) => query("/own", { group: group.value.trim(), after, limit: 50 }),
    (page) => ({ rows: page.claims, next: page.next, note: `${count(page.members.length)} ${page.members.length === 1 ? "proxy holds" : "proxies hold"} claims for clients` }));
}

// Views by the fragment of the address. A view's sections are made when it is opened, and updated every second.

const VIEWS = {
  overview: { name: "Overview", sections: (latest) => [brokers(latest), workers(latest), timeline(8), limits(latest), proxies(latest), facts(latest)] },
  topics: { name: "Topics", sections: () => [topics()], has: (latest) => latest.kind === "proxy" },
  partitions: { name: "Partitions", sections: (latest) => [partitions(latest)] },
  clients: { name: "Clients", sections: (latest) => [clients(latest)], has: (latest) => latest.kind === "proxy" },
  claims: { name: "Claims", sections: (latest) => [claims(latest)], has: (latest) => latest.claims !== undefined && latest.claims !== null },
  lately: { name: "Lately", sections: () => [timeline(100)] },
};
const state = { overview: undefined, heard: 0, view: undefined, sections: [], source: undefined, polls: undefined };

function open() {
  const known = Object.keys(VIEWS).filter((name) => !VIEWS[name].has || VIEWS[name].has(state.overview));
  const wanted = location.hash.slice(1);
  const view = known.includes(wanted) ? wanted : "overview";
  const tabs = known.join();
  if (view === state.view && tabs === state.tabs) return;
  [state.view, state.tabs] = [view, tabs];
  $("tabs").replaceChildren(...known.map((name) => h("li", {}, h("a", { class: "tab", href: `#${name}`, "aria-current": name === view ? "page" : undefined }, VIEWS[name].name))));
  state.sections = VIEWS[view].sections(state.overview).filter(Boolean);
  $("numbers").hidden = view !== "overview";
  $("panels").replaceChildren(...state.sections);
  for (const each of state.sections) (each.refresh ?? (() => {}))();
}
function numbers(latest) {
  const shown = [["clients", count(latest.clients)], ["partitions owned", count(latest.partitions)]];
  if (latest.rates) shown.push(["requests/s", rate(latest.rates.requests)], ["received/s", bytes(latest.rates.received_bytes)], ["sent/s", bytes(latest.rates.sent_bytes)]);
  if (latest.claims) shown.push(["claims", count(latest.claims)]);
  $("numbers").replaceChildren(...shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
function say(level, verdict, about) {
  $("verdict").className = `verdict ${level}`;
  if ($("verdict-text").textContent !== verdict) $("verdict-text").textContent = verdict;
  $("about").textContent = about;
}
function show(latest) {
  [state.overview, state.heard] = [latest, Date.now()];
  $("login").hidden = true;
  $("views").hidden = false;
  document.title = `${latest.verdict.level === "good" ? "" : "⚠ "}${latest.name}`;
  say(latest.verdict.level, latest.verdict.text, `${latest.name}, up for ${ago(latest.started)}`);
  $("footer").textContent = `kproxy ${latest.version}. Times are this browser's.`;
  numbers(latest);
  open();
  for (const each of state.sections) each.update(latest);
}

// What the process says. Without a stream (there may be too many) it is asked every few seconds.

async function ask(path) {
  try {
    const answer = await fetch(path, { cache: "no-store" });
    if (answer.status === 401) { enter(); return "the session is over"; }
    return answer.ok ? await answer.json() : (await answer.text()).trim();
  } catch { return "it does not answer"; }
}
function stream() {
  state.source?.close();
  state.source = new EventSource("/events");
  state.source.onmessage = (event) => show(JSON.parse(event.data));
  state.source.onerror = () => { if (state.source.readyState === EventSource.CLOSED) poll(); };
}
function poll() {
  clearTimeout(state.polls);
  state.polls = setTimeout(async () => {
    const answer = await ask("/overview");
    if (typeof answer !== "string") show(answer);
    if ($("login").hidden) Math.random() < 0.2 ? stream() : poll();
  }, 3000);
}
setInterval(() => {
  const silent = Math.round((Date.now() - state.heard) / 1000);
  if (state.overview && silent >= 5) say("bad", "no answer from this process", `${state.overview.name}, heard ${silent} s ago; what follows is as of then`);
}, 1000);

async function enter() {
  const session = await ask("/login");
  if (typeof session === "string") { say("bad", "no answer from this process", session); setTimeout(enter, 3000); return; }
  $("logout").hidden = !session.has_session;
  if (!session.is_needed) { stream(); return; }
  state.source?.close();
  state.overview = undefined;
  say("idle", "kproxy", "");
  $("views").hidden = true;
  $("login").hidden = false;
  $("token").focus();
}
$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await fetch("/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token: $("token").value }) });
  $("login-problem").textContent = answer.ok ? "" : (await answer.text()).trim();
  $("token").value = "";
  if (answer.ok) enter();
});
$("logout").addEventListener("click", async () => { await fetch("/logout", { method: "POST" }); state.source?.close(); enter(); });
// A page that is kept for the Back button must not keep a connection.
addEventListener("pagehide", () => state.source?.close());
addEventListener("pageshow", (event) => { if (event.persisted) enter(); });
addEventListener("hashchange", () => { if (state.overview) { open(); for (const each of state.sections) each.update(state.overview); } });
enter();
