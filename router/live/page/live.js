"use strict";
// Requests the router's state once a second and shows it. Keeps the last five minutes.

const KEPT_S = 300, RECENT_S = 60, MOVING_S = 10, LOST_S = 60, BUCKET_S = 5, FEW = 8, MANY = 24, MAX_EDGES = 60;
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const kept = { requests: [], counts: [], workers: new Map(), last: 0, router: "", state: null, chosen: null };

let token = sessionStorage.getItem("metrics-token") || "";

function headers() {
  return token ? { authorization: `Bearer ${token}` } : {};
}

async function fetchJson(path) {
  const answer = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(5000) });
  if (answer.status === 401 || answer.status === 403) throw new Error("token");
  if (!answer.ok) throw new Error(`the router answers ${answer.status}`);
  return answer.json();
}

const milliseconds = (ms) => ms >= 10000 ? `${(ms / 1000).toFixed(0)} s` : ms >= 1000 ? `${(ms / 1000).toFixed(2)} s`
  : ms >= 100 ? `${ms.toFixed(0)} ms` : ms >= 1 ? `${ms.toFixed(1)} ms` : ms > 0 ? `${ms.toFixed(2)} ms` : "0";
const plain = (value) => value >= 1e6 ? `${(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${(value / 1e3).toFixed(0)}k`
  : value >= 100 ? value.toFixed(0) : value >= 10 || value === 0 ? `${+value.toFixed(1)}` : `${+value.toFixed(2)}`;
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
}

const perToken = (request) => request.output_tokens > 1 ? request.decode_ms / (request.output_tokens - 1) : null;

function meets(request, slo) {
  const ttft = (slo.ttft_s + slo.ttft_token_s * request.prompt_tokens) * 1000;
  const each = perToken(request);
  return request.first_token_ms <= ttft && (each === null || each <= slo.itl_s * 1000);
}

// Adds the workers that vanished within the last minute without leaving, until their successors appear.
function addLost(state) {
  const now = state.unix_time_s, names = new Set(state.workers.map((each) => each.id));
  for (const worker of state.workers) kept.workers.set(worker.id, { worker, at: now });
  for (const [id, { worker, at }] of kept.workers) {
    if (names.has(id)) continue;
    if (worker.leaving || now - at > LOST_S) kept.workers.delete(id);
    else state.workers.push({ ...worker, ready: false, lost: true, running: 0, waiting: 0, queued_prefill_tokens: 0, free_pages: worker.pages });
  }
}

function remember(state) {
  addLost(state);
  const now = state.unix_time_s;
  kept.last = state.last_request;
  kept.router = state.router;  // routers may share a port: the page then shows the requests of all that have answered
  const known = new Set(kept.requests.map((each) => each.key));
  const named = state.requests.map((each) => ({ ...each, key: `${state.router} ${each.number}` }));
  kept.requests.push(...named.filter((each) => !known.has(each.key) && now - each.ended_s <= KEPT_S));
  kept.requests = kept.requests.filter((each) => now - each.ended_s <= KEPT_S).sort((a, b) => a.ended_s - b.ended_s);
  const sum = (role, field) => state.workers.filter((each) => each.role === role)
    .reduce((total, each) => total + each[field], 0);
  const all = (field) => sum("prefill", field) + sum("decode", field);
  kept.counts.push({ at: now, prefill: all("prefill_tokens"), decode: all("decode_tokens"), workers: state.workers.length });
  kept.counts = kept.counts.filter((each) => now - each.at <= KEPT_S);
  kept.state = state;
}

function rates(field) {
  const points = [];
  for (let i = 1; i < kept.counts.length; i += 1) {
    const [before, after] = [kept.counts[i - 1], kept.counts[i]];
    const seconds = after.at - before.at, tokens = after[field] - before[field];
    if (seconds > 0 && tokens >= 0) points.push([after.at, tokens / seconds]);  // negative when a worker has left
  }
  return points;
}

function percentiles(read, shares) {
  const buckets = new Map();
  for (const request of kept.requests) {
    const value = read(request);
    if (value === null) continue;
    const at = Math.floor(request.ended_s / BUCKET_S) * BUCKET_S;
    if (!buckets.has(at)) buckets.set(at, []);
    buckets.get(at).push(value);
  }
  const times = [...buckets.keys()].sort((a, b) => a - b);
  return shares.map((share) => times.map((at) => [at + BUCKET_S / 2, quantile(buckets.get(at), share)]));
}

function figure(name, value, note, state) {
  const box = document.createElement("div"), title = document.createElement("dt");
  const number = document.createElement("strong"), small = document.createElement("small");
  box.className = state || "";
  title.textContent = name; number.textContent = value; small.textContent = note;
  box.append(title, number, small);
  return box;
}

function showFigures(state) {
  const recent = kept.requests.filter((each) => state.unix_time_s - each.ended_s <= RECENT_S);
  const ttft = recent.map((each) => each.first_token_ms), tpot = recent.map(perToken).filter((value) => value !== null);
  const met = recent.filter((request) => meets(request, state.slo)).length;
  const show = (value) => value === null ? "–" : milliseconds(value);
  const against = (value, limit) => value === null ? "" : value <= limit ? "good" : "bad";
  const ready = state.workers.filter((worker) => worker.ready).length;
  const newest = (field) => (rates(field).at(-1) || [0, 0])[1];
  const cached = recent.reduce((sum, each) => sum + each.cached_tokens, 0);
  const prompts = recent.reduce((sum, each) => sum + each.prompt_tokens, 0);
  $("figures").replaceChildren(
    figure("TTFT p50", show(quantile(ttft, 0.5)), `p90 ${show(quantile(ttft, 0.9))}`, against(quantile(ttft, 0.9), state.slo.ttft_s * 1000)),
    figure("per token p50", show(quantile(tpot, 0.5)), `p90 ${show(quantile(tpot, 0.9))}`, against(quantile(tpot, 0.9), state.slo.itl_s * 1000)),
    figure("within the SLO", recent.length ? `${Math.floor(100 * met / recent.length)} %` : "–", `${recent.length} ended in a minute`, recent.length ? (met / recent.length >= 0.99 ? "good" : "bad") : ""),
    figure("output tokens/s", plain(newest("decode")), `prompt tokens/s ${plain(newest("prefill"))}`),
    figure("cached", prompts ? `${Math.round(100 * cached / prompts)} %` : "–", "of the prompts' tokens"),
    figure("in flight", plain(state.in_flight), `saturation ${Math.round(100 * state.saturation)} %`),
    figure("workers", `${ready} of ${state.workers.length}`, "take requests", ready === state.workers.length && ready ? "good" : "bad"),
  );
}

function showCharts(state) {
  const to = state.unix_time_s, since = Math.min(kept.counts[0].at, kept.requests.length ? kept.requests[0].ended_s : to);
  const window = { from: to - Math.min(KEPT_S, Math.max(RECENT_S, to - since)), to };  // grows to five minutes
  const colors = [color("pages"), color("batch"), color("prefill")];
  const lines = (found, names) => found.map((points, i) => ({ name: names[i], points, color: colors[i], gap: 4 * BUCKET_S }));
  const shares = [0.5, 0.9, 0.99], names = ["p50", "p90", "p99"];
  drawChart("ttft", lines(percentiles((each) => each.first_token_ms, shares), names),
    { ...window, format: milliseconds, target: state.slo.ttft_s * 1000 });
  drawChart("tpot", lines(percentiles(perToken, shares), names), { ...window, format: milliseconds, target: state.slo.itl_s * 1000 });
  drawChart("tokens", [["decode", "batch"], ["prefill", "prefill"]].map(([field, name]) =>
    ({ name: field, points: rates(field), color: color(name), gap: 15 })), { ...window, format: plain });
}

function bar(kind, share) {
  const outer = document.createElement("div"), inner = document.createElement("i");
  outer.className = "bar"; inner.className = kind;
  inner.style.width = `${Math.round(100 * Math.max(0, Math.min(1, share)))}%`;
  outer.append(inner);
  return outer;
}

function describe(worker) {
  const used = worker.pages ? Math.round(100 * (1 - worker.free_pages / worker.pages)) : 0;
  const parts = [`${worker.id} on ${worker.host || "an unknown machine"}`,
    worker.ready && worker.avoided ? "is avoided because requests to it have failed" : worker.ready ? "takes requests" : worker.leaving ? "is leaving" : worker.lost ? "is lost" : "takes no requests",
    `${worker.running} running`, `${worker.waiting} waiting`, `${used} % of ${worker.pages} pages in use`];
  if (worker.queued_prefill_tokens) parts.push(`${worker.queued_prefill_tokens} prompt tokens to compute`);
  if (worker.step_ms) parts.push(`${milliseconds(worker.step_ms)} a step`);
  if (worker.cache_queries) parts.push(`${Math.round(100 * worker.cache_hits / worker.cache_queries)} % of pages found`);
  for (const [name, value] of Object.entries(worker.metrics)) parts.push(`${name.replaceAll("_", " ")} ${plain(value)}`);
  return parts.join(", ");
}

function showWorker(worker, box, isSmall) {
  box.className = `worker${worker.leaving || (worker.ready && worker.avoided) ? " leaving" : worker.ready ? "" : " away"}`;
  box.dataset.worker = worker.id;
  box.title = describe(worker);
  const name = document.createElement("b"), note = document.createElement("small");
  const role = `${worker.role}-`;
  name.textContent = isSmall && worker.id.startsWith(role) ? worker.id.slice(role.length) : worker.id;
  note.textContent = worker.leaving ? "leaving" : worker.lost ? "lost" : !worker.ready ? "away" : worker.avoided ? "avoided"
    : worker.role === "prefill" ? `${worker.running} running, ${plain(worker.queued_prefill_tokens)} tokens wait`
      : `${worker.running} running, ${worker.waiting} waiting`;
  const batch = worker.role === "prefill" ? Math.min(1, worker.queued_prefill_tokens / 8192)
    : worker.running / (worker.max_running || 1);
  box.replaceChildren(name, note, bar("batch", batch), bar("pages", worker.pages ? 1 - worker.free_pages / worker.pages : 0));
}

function showPool(role, workers) {
  const pool = $(role), known = new Map([...pool.children].map((box) => [box.dataset.worker, box]));
  pool.classList.toggle("many", workers.length > MANY);
  pool.classList.toggle("few", workers.length <= FEW);
  for (const worker of workers) {
    let box = known.get(worker.id);
    if (!box) {
      box = document.createElement("button");
      box.type = "button";
      box.addEventListener("click", () => { kept.chosen = box.dataset.worker; showChosen(); });
      pool.append(box);
    }
    known.delete(worker.id);
    showWorker(worker, box, workers.length > MANY);
  }
  for (const gone of known.values()) gone.remove();
  const boxes = new Map([...pool.children].map((box) => [box.dataset.worker, box]));
  workers.forEach((worker, at) => {  // moves only boxes whose place has changed, so that the focus stays
    const box = boxes.get(worker.id);
    if (pool.children[at] !== box) pool.insertBefore(box, pool.children[at]);
  });
}

function showChosen() {
  const worker = kept.state.workers.find((each) => each.id === kept.chosen);
  $("worker-detail").textContent = worker ? describe(worker) : "";
}

// Shows an edge for each of the pairs of workers that moved the most pages lately, wider for more pages.
function showEdges(state) {
  const moved = new Map();
  for (const request of kept.requests) {
    if (!request.pages_moved || state.unix_time_s - request.ended_s > MOVING_S) continue;
    const pair = `${request.prefill_worker}\n${request.decode_worker}`;
    moved.set(pair, (moved.get(pair) || 0) + request.pages_moved);
  }
  const frame = $("fleet").getBoundingClientRect(), boxes = new Map();
  for (const box of document.querySelectorAll(".worker")) boxes.set(box.dataset.worker, box.getBoundingClientRect());
  $("edges").setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  const busiest = [...moved].sort((one, other) => other[1] - one[1]).slice(0, MAX_EDGES);
  const widest = state.workers.length > 2 * MANY ? 2 : 8;
  $("edges").replaceChildren(...busiest.flatMap(([pair, pages]) => {
    const [from, to] = pair.split("\n").map((id) => boxes.get(id));
    if (!from || !to) return [];
    const x1 = from.right - frame.left, y1 = from.top + from.height / 2 - frame.top;
    const x2 = to.left - frame.left, y2 = to.top + to.height / 2 - frame.top, middle = (x1 + x2) / 2;
    const path = element("path", { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
      "stroke-width": Math.min(widest, 1 + Math.log2(1 + pages) / 2) });
    path.dataset.pair = pair;
    return [path];
  }));
}

function showLanes(state) {
  const highest = Math.max(10, ...Object.values(state.lanes));
  $("lanes").replaceChildren(...Object.entries(state.lanes).map(([lane, waiting]) => {
    const row = document.createElement("div"), name = document.createElement("span"), count = document.createElement("span");
    row.className = "lane"; name.textContent = lane; count.textContent = `${waiting}`;
    row.append(name, bar("batch", waiting / highest), count);
    return row;
  }));
}

const STAGE_COLOURS = {
  tokenize: "other", admission: "queue", placement: "other", queue: "queue", prefill: "prefill", transfer: "transfer",
  "decode queue": "queue", calls: "other", decode: "decode",
};

function stages(request, wide) {
  const strip = document.createElement("div");
  strip.className = wide ? "stages wide" : "stages";
  const { decode, ...earlier } = request.stages_ms;
  const known = Object.values(earlier).reduce((sum, ms) => sum + ms, 0);
  const parts = [...Object.entries(earlier), ["calls", Math.max(0, request.first_token_ms - known)], ["decode", decode]];
  const whole = parts.reduce((sum, part) => sum + part[1], 0) || 1;
  for (const [name, ms] of parts) {
    if (ms <= 0) continue;
    const part = document.createElement("i");
    part.style.width = `${100 * ms / whole}%`;
    part.style.background = `var(--${STAGE_COLOURS[name]})`;
    strip.append(part);
  }
  strip.title = parts.map(([name, ms]) => `${name} ${milliseconds(ms)}`).join(", ");
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", strip.title);
  return strip;
}

function showRequests() {
  const newest = kept.requests.slice(-50).reverse();
  $("no-requests").hidden = newest.length > 0;
  document.querySelector("#requests tbody").replaceChildren(...newest.map((request) => {
    const row = document.createElement("tr"), each = perToken(request);
    const cells = [clock(request.ended_s), request.request_id, request.lane, plain(request.prompt_tokens),
      plain(request.cached_tokens), plain(request.output_tokens), milliseconds(request.first_token_ms),
      each === null ? "–" : milliseconds(each), request.prefill_worker || "–", request.decode_worker];
    for (const text of cells) { const cell = document.createElement("td"); cell.textContent = text; row.append(cell); }
    row.children[1].className = "id"; row.children[1].title = request.request_id;
    for (const cell of [...row.children].slice(3, 8)) cell.className = "number";
    const last = document.createElement("td");
    last.append(stages(request, false));
    row.append(last);
    return row;
  }));
}

function line(seconds, text) {
  const item = document.createElement("li"), when = document.createElement("time");
  when.textContent = clock(seconds);
  item.append(when, text);
  return item;
}

function none(text) {
  const item = document.createElement("li");
  item.textContent = text;
  return item;
}

function showController(controller) {
  const scaling = controller.scaling.map((each) => line(each.unix_time_s, `${each.pool} ${each.verdict}: `
    + `${each.current === each.decided ? each.current : `${each.current} → ${each.decided}`} workers; ${each.reason}`));
  $("scaling").replaceChildren(...(scaling.length ? scaling.reverse() : [none(controller.mode === "off" ? "the autoscaler is off" : "nothing yet")]));
  const events = controller.events.slice(-60).reverse().map((each) =>
    line(each.unix_time_s, `${each.subject} ${each.what}${each.reason ? `: ${each.reason}` : ""}`));
  $("events").replaceChildren(...(events.length ? events : [none("no events")]));
}

function show(state) {
  $("model").textContent = state.model;
  showFigures(state);
  showCharts(state);
  const byName = (a, b) => a.id.localeCompare(b.id, undefined, { numeric: true });
  for (const role of ["prefill", "decode"]) showPool(role, state.workers.filter((each) => each.role === role).sort(byName));
  showEdges(state);
  showChosen();
  showLanes(state);
  showRequests();
}

function connection(text, lost) {
  $("connection").textContent = text;
  $("connection").classList.toggle("lost", lost);
}

async function follow() {
  for (;;) {
    try {
      const state = await fetchJson(`state?router=${kept.router}&after=${kept.last}`);
      remember(state);
      show(state);
      connection(`as of ${clock(state.unix_time_s)}`, false);
      $("login").hidden = true;
      showController(await fetchJson("controller"));
    } catch (error) {
      if (error.message === "token") { $("login").hidden = false; connection("a token is needed", true); } else {
        connection(`the router does not answer (${error.message}); trying again`, true);
      }
    }
    await new Promise((wake) => { setTimeout(wake, document.hidden ? 5000 : 1000); });
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("metrics-token", token);
});

// The playground sends a normal request and shows the stages that the router recorded.

let running = null;

function note(text, isError) {
  const item = document.createElement("p");
  item.textContent = text;
  item.className = isError ? "error" : "";
  $("way").replaceChildren(item);
}

async function play() {
  const key = $("api-key").value.trim(), started = performance.now();
  running = new AbortController();
  $("answer").textContent = ""; $("way").replaceChildren();
  const body = { prompt: $("prompt").value, max_tokens: +$("max-tokens").value, temperature: +$("temperature").value, stream: true };
  const answer = await fetch("/v1/completions", { method: "POST", signal: running.signal, body: JSON.stringify(body),
    headers: { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) } });
  if (!answer.ok) {
    if (answer.status === 401) $("key-label").hidden = false;
    const problem = await answer.json().catch(() => ({}));
    throw new Error(problem.error ? problem.error.message : `the router answers ${answer.status}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", first = null, id = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const data of lines.filter((each) => each.startsWith("data: ") && each !== "data: [DONE]")) {
      const chunk = JSON.parse(data.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      id = chunk.id || id;
      if (first === null) first = performance.now() - started;
      $("answer").textContent += chunk.choices[0] ? chunk.choices[0].text : "";
    }
  }
  note(`${id}: first token after ${milliseconds(first || 0)}, end after ${milliseconds(performance.now() - started)}, measured by this page`);
  await showWay(id);
}

async function showWay(id) {
  for (let attempt = 0; attempt < 5; attempt += 1) {
    const request = kept.requests.find((each) => id && id.includes(each.request_id));
    if (request) {
      const text = document.createElement("p");
      text.textContent = `prefill at ${request.prefill_worker}, decode at ${request.decode_worker}, ${request.pages_moved} pages moved; `
        + $("way").appendChild(stages(request, true)).title;
      $("way").append(text);
      return;
    }
    await new Promise((wake) => { setTimeout(wake, 600); });
  }
}

$("play").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [send, stop] = [$("play").querySelector("button"), $("stop")];
  send.disabled = true; stop.disabled = false;
  try { await play(); } catch (error) { note(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError"); }
  send.disabled = false; stop.disabled = true;
});
$("stop").addEventListener("click", () => running && running.abort());
window.addEventListener("resize", () => kept.state && show(kept.state));

fetch("/v1/models").then((answer) => {  // the operators' port does not serve the model
  if (answer.status === 404) $("playground").hidden = true;
  if (answer.status === 401) $("key-label").hidden = false;
}).catch(() => {});
follow();
