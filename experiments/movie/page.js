"use strict";
// Draws one frame of the recording at a time. All text enters the page as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a500",
  "#7a5fd0", "#9a6a4f", "#748296", "#c2185b", "#5aa832"];
const KINDS = { admit: "Admission", prefill: "Prefill", fork: "Fork", decode: "Decode",
  preempt: "Preemption", swap_out: "Swap out", swap_in: "Swap in", release: "Release",
  evict: "Eviction", window: "Window" };
const EFFECTS = { take: "allocation", share: "sharing", copy: "copy-on-write", adopt: "adoption",
  evict: "eviction", preempt: "preemption", swap_out: "swap out", swap_in: "swap in",
  window: "window", finish: "release" };

let run = data.runs[0], at = 0, timer = null, hot = null, pinned = false;

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// --- colours ---------------------------------------------------------------------------------

function colour([request, sample]) {
  const base = COLOURS[request % COLOURS.length];
  const many = run.requests[request].samples.length;
  const shift = many > 1 ? sample / (many - 1) - 0.5 : 0; // samples: darker to lighter
  const parts = [1, 3, 5].map((i) => parseInt(base.slice(i, i + 2), 16));
  const to = shift < 0 ? 0 : 255, part = Math.abs(shift) * 0.9;
  return "#" + parts.map((c) => Math.round(c + (to - c) * part).toString(16).padStart(2, "0")).join("");
}

function bands(owners, alpha = "") {
  const step = 100 / owners.length;
  const stops = owners.map((o, i) => `${colour(o)}${alpha} ${i * step}% ${(i + 1) * step}%`);
  return `linear-gradient(${stops.join(", ")})`;
}

// --- what a frame says -----------------------------------------------------------------------

function ownersOf(frame) {
  const owners = new Map();
  for (const [request, sample, , , table] of frame.tables)
    table.forEach((page, column) => {
      if (!page) return;
      if (!owners.has(page)) owners.set(page, []);
      owners.get(page).push([request, sample, column]);
    });
  return owners;
}

function nameOf(request, sample) {
  return run.requests[request].samples.length > 1 ? `${request}.${sample}` : `${request}`;
}

function tokensOf(request, sample) {
  const known = run.requests[request];
  return known.prompt.concat(known.samples[sample] || []);
}

// What became of a page in this frame; with an owner, of its entry in that sequence's table.
function changeOf(frame, page, owner) {
  const here = ([request, sample, found]) => found === page
    && (!owner || (owner[0] === request && owner[1] === sample));
  const copies = frame.copied.map(([request, sample, , target]) => [request, sample, target]);
  if (frame.taken.some(here) || copies.some(here)) return "taken";
  if (frame.joined.some(here)) return "joined";
  return !owner && frame.freed.includes(page) ? "freed" : "";
}

// --- drawing ---------------------------------------------------------------------------------

function buildPool() {
  $("pool").querySelectorAll(".page").forEach((element) => element.remove());
  for (let page = 0; page < run.num_pages; page++) {
    const body = make("span", "body", make("span", "ink"), make("span", "slots"));
    const cell = make("button", "page", make("span", "no", `${page}`), make("span", "ref"), body);
    cell.dataset.page = page;
    cell.style.setProperty("--size", run.page_size);
    $("pool").append(cell);
  }
}

function drawPool(frame) {
  const owners = ownersOf(frame), fill = new Map(frame.fill);
  const idle = new Set(frame.idle.map(([page]) => page)), cached = new Set(frame.cached);
  for (const cell of $("pool").querySelectorAll(".page")) {
    const page = +cell.dataset.page, mine = owners.get(page);
    const state = page === 0 ? "null" : mine ? "held" : idle.has(page) ? "idle" : "free";
    const change = changeOf(frame, page);
    cell.className = `page ${state} ${cached.has(page) ? "known" : ""} ${change}`;
    const [, ref, body] = cell.children;
    ref.textContent = mine && mine.length > 1 ? `×${mine.length}` : "";
    body.style.background = mine ? bands(mine, "40") : "";
    body.children[0].style.background = mine ? bands(mine) : "";
    body.children[0].style.width = mine ? `${(100 * fill.get(page)) / run.page_size}%` : "0";
    body.children[1].hidden = !mine;
    const words = { null: "the null page", idle: "only in the prefix cache", free: "free" };
    const held = mine ? `held by ${mine.map(([r, s]) => nameOf(r, s)).join(", ")}` : words[state];
    cell.setAttribute("aria-label", `page ${page}: ${held}${change ? `, ${change} now` : ""}`);
  }
  drawArrows(frame);
}

function drawArrows(frame) {
  const svg = $("arrows"), ns = "http://www.w3.org/2000/svg";
  svg.replaceChildren();
  if (!frame.copied.length) return;
  const shape = (name, values) => {
    const element = document.createElementNS(ns, name);
    for (const [key, value] of Object.entries(values)) element.setAttribute(key, value);
    return element;
  };
  const head = shape("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5,
    markerHeight: 5, orient: "auto-start-reverse" });
  head.append(shape("path", { d: "M0 0L8 4L0 8z" }));
  svg.append(head);
  const box = $("pool").getBoundingClientRect();
  const centre = (page) => {
    const cell = $("pool").querySelector(`.page[data-page="${page}"]`).getBoundingClientRect();
    return [cell.left + cell.width / 2 - box.left, cell.top + 38 - box.top];
  };
  for (const [, , source, target] of frame.copied) {
    const [x1, y1] = centre(source), [x2, y2] = centre(target);
    svg.append(shape("line", { x1, y1, x2, y2, "marker-end": "url(#head)" }));
  }
}

function drawTables(frame) {
  const fill = new Map(frame.fill);
  const rows = frame.tables.map(([request, sample, length, computed, table]) => {
    const swatch = make("span", "swatch");
    swatch.style.background = colour([request, sample]);
    const tokens = computed < length ? `${computed} of ${length} tokens` : `${length} tokens`;
    const who = make("button", "who", swatch, nameOf(request, sample), make("small", "", tokens));
    who.title = tokensOf(request, sample).slice(0, length).join("");
    who.dataset.sequence = `${request} ${sample}`;
    const entries = table.map((page, column) => {
      const bar = make("i");
      const entry = make("button", `entry ${page ? changeOf(frame, page, [request, sample]) : "dropped"}`,
        make("small", "", `${column}`), page ? `${page}` : "–", bar);
      const share = (100 * (fill.get(page) || 0)) / run.page_size, tint = colour([request, sample]);
      if (page) bar.style.background = `linear-gradient(90deg, ${tint} ${share}%, ${tint}40 ${share}%)`;
      if (page) entry.dataset.page = page;
      entry.setAttribute("aria-label", page ? `logical page ${column} is page ${page}`
        : `logical page ${column} left the sliding window`);
      return entry;
    });
    return make("div", "seq", who, make("div", "entries", ...entries));
  });
  $("tables").replaceChildren(...(rows.length ? rows : [make("p", "quiet", "No sequence runs.")]));
}

function drawWaiting(frame) {
  const chips = frame.waiting.map(([request, parked]) => {
    const swatch = make("span", "swatch");
    swatch.style.background = colour([request, 0]);
    let words = `request ${request}`;
    if (parked) words += parked.why === "swap_out" ? `: ${parked.pages} pages in host memory`
      : ": will be computed again";
    const chip = make("span", "", swatch, words);
    chip.title = run.requests[request].prompt.join("");
    return chip;
  });
  $("waiting").replaceChildren(...(chips.length ? chips : [make("span", "none", "nobody")]));
}

function drawCounters({ counters }) {
  const percent = (x) => (x === null ? "–" : `${(100 * x).toFixed(0)}%`);
  const shown = [["pages free", counters.free], ["used", counters.used],
    ["only cached", counters.cached], ["shared", counters.shared],
    ["slots filled", percent(counters.utilisation)], ["saved by sharing", percent(counters.saved)]];
  $("counters").replaceChildren(...shown.map(([name, value]) =>
    make("div", "", make("dt", "", name), make("dd", "", `${value}`))));
}

function drawChart() {
  const total = run.num_pages - 1, count = run.frames.length, ns = "http://www.w3.org/2000/svg";
  const area = (levels, colour) => {
    const path = document.createElementNS(ns, "path");
    const steps = levels.map((n, i) => {
      const y = 100 - (100 * n) / total;
      return `L${(100 * i) / count} ${y}L${(100 * (i + 1)) / count} ${y}`;
    });
    path.setAttribute("d", `M0 100${steps.join("")}L100 100z`);
    path.style.fill = `var(--chart-${colour})`;
    return path;
  };
  const used = run.frames.map((f) => f.counters.used);
  const both = run.frames.map((f, i) => used[i] + f.counters.cached);
  $("chart").replaceChildren(area(used.map(() => total), "free"), area(both, "cached"),
    area(used, "used"));
  run.frames.forEach((frame, i) => {
    if (!frame.effects.some((e) => e === "preempt" || e === "swap_out")) return;
    const line = document.createElementNS(ns, "line");
    const x = (100 * (i + 0.5)) / count;
    for (const [key, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: 100 })) line.setAttribute(key, value);
    line.style.cssText = "stroke: var(--warn); stroke-width: 2px; vector-effect: non-scaling-stroke";
    $("chart").append(line);
  });
}

function drawEffects() {
  const chips = Object.entries(EFFECTS).map(([effect, word]) => {
    const count = run.frames.filter((f) => f.effects.includes(effect)).length;
    if (!count) return null;
    const chip = make("button", "", `${word} ${count}`);
    chip.dataset.effect = effect;
    chip.title = `go to the next frame that shows it`;
    return chip;
  });
  $("effects").replaceChildren(...chips.filter(Boolean));
}

// --- page <-> table entry, and the tokens inside -----------------------------------------------

function tokenSpans(tokens, first, from, to) {
  const spans = tokens.slice(from, to).map((t, i) =>
    make("span", from + i >= first ? "said" : "", t.replace(/\n/g, "↵\n") || " "));
  return make("p", "tokens", ...spans);
}

function describePage(frame, page) {
  const owners = ownersOf(frame).get(page), size = run.page_size;
  const idle = frame.idle.find(([p]) => p === page);
  if (page === 0) return [make("p", "", "Page 0 is the null page: nobody gets it.")];
  if (!owners && !idle) return [make("p", "", `Page ${page} is free.`)];
  const [request, sample, column] = owners ? owners[0] : [idle[1], 0, idle[2]];
  const filled = owners ? new Map(frame.fill).get(page) : size;
  const who = owners ? owners.map(([r, s, c]) => `logical page ${c} of ${nameOf(r, s)}`).join(", ")
    : "only the prefix cache holds it";
  const cached = owners && frame.cached.includes(page) ? "; the prefix cache knows it too" : "";
  const lines = [make("p", "", make("b", "", `Page ${page}`), `: ${who}${cached}. `
    + `${filled} of ${size} slots filled; reference count ${frame.refcount[page]}.`)];
  if (request >= 0) lines.push(tokenSpans(tokensOf(request, sample),
    run.requests[request].prompt.length, column * size, column * size + filled));
  return lines;
}

function describeSequence(frame, name) {
  const [request, sample] = name.split(" ").map(Number);
  const row = frame.tables.find((t) => t[0] === request && t[1] === sample);
  if (!row) return [];
  const prompt = run.requests[request].prompt.length;
  return [make("p", "", make("b", "", `Sequence ${nameOf(request, sample)}`),
    `: ${prompt} prompt tokens, ${Math.max(0, row[2] - prompt)} written since (underlined in colour).`),
    tokenSpans(tokensOf(request, sample), prompt, 0, row[2])];
}

function drawHot() {
  const frame = run.frames[at], page = hot && hot.page, sequence = hot && hot.sequence;
  document.querySelectorAll(".hot").forEach((e) => e.classList.remove("hot"));
  const mine = sequence ? new Set(frame.tables.filter((t) => `${t[0]} ${t[1]}` === sequence)
    .flatMap((t) => t[4])) : new Set(page === undefined || page === null ? [] : [+page]);
  mine.delete(sequence ? 0 : -1);
  document.querySelectorAll("[data-page]").forEach((e) => {
    if (mine.has(+e.dataset.page) && (!sequence || e.classList.contains("page"))) e.classList.add("hot");
  });
  const lines = sequence ? describeSequence(frame, sequence)
    : page === undefined || page === null ? [] : describePage(frame, +page);
  const hint = make("p", "quiet", "Point at a page, a table entry or a sequence, or tap it, to see "
    + "what is in it.");
  $("details").classList.toggle("open", lines.length > 0);
  $("details").replaceChildren(...(lines.length ? lines : [hint]));
}

function point(event, keep) {
  const target = event.target.closest("[data-page], [data-sequence]");
  if (!target) return;
  const { page, sequence } = target.dataset;
  if (keep && pinned && hot && hot.page === page && hot.sequence === sequence) {
    pinned = false;
    hot = null;
  } else if (keep || !pinned) {
    hot = { page, sequence };
    pinned = pinned || keep;
  }
  drawHot();
}

function letGo() {
  hot = null;
  pinned = false;
  drawHot();
}

for (const id of ["pool", "tables"]) {
  $(id).addEventListener("pointerover", (e) => e.pointerType === "mouse" && point(e, false));
  $(id).addEventListener("focusin", (e) => e.target.matches(":focus-visible") && point(e, false));
  $(id).addEventListener("click", (e) => point(e, true));
  $(id).addEventListener("pointerleave", () => {
    if (!pinned) { hot = null; drawHot(); }
  });
}

// --- playing ---------------------------------------------------------------------------------

function show(index) {
  at = Math.max(0, Math.min(run.frames.length - 1, index));
  const frame = run.frames[at];
  $("slider").value = at;
  $("place").textContent = `${at + 1} of ${run.frames.length}`;
  $("slider").setAttribute("aria-valuetext", `frame ${at + 1}: ${frame.caption}`);
  $("kind").textContent = KINDS[frame.kind] || frame.kind;
  $("words").textContent = frame.caption;
  $("cursor").style.left = `${(100 * (at + 0.5)) / run.frames.length}%`;
  drawCounters(frame);
  drawTables(frame);
  drawPool(frame);
  drawWaiting(frame);
  drawHot();
  for (const chip of $("effects").children)
    chip.classList.toggle("now", frame.effects.includes(chip.dataset.effect));
  const link = `#run=${data.runs.indexOf(run)}&frame=${at + 1}`;
  try { history.replaceState(null, "", link); } catch { /* a sandbox that forbids it */ }
}

function pause() {
  clearTimeout(timer);
  timer = null;
  $("play").textContent = "Play";
  $("caption").setAttribute("aria-live", "polite");
}

function tick() {
  if (at === run.frames.length - 1) return pause();
  show(at + 1);
  timer = setTimeout(tick, 1000 / +$("speed").value);
}

function toggle() {
  if (timer !== null) return pause();
  if (at === run.frames.length - 1) show(0);
  $("play").textContent = "Pause";
  $("caption").setAttribute("aria-live", "off"); // too fast to be read aloud
  timer = setTimeout(tick, 1000 / +$("speed").value);
}

function go(index) {
  pause();
  show(index);
}

function faster(step) {
  const speed = $("speed");
  speed.selectedIndex = Math.max(0, Math.min(speed.options.length - 1, speed.selectedIndex + step));
}

function nextWith(effect) {
  const count = run.frames.length;
  for (let i = 1; i <= count; i++)
    if (run.frames[(at + i) % count].effects.includes(effect)) return go((at + i) % count);
}

function choose(index, frame) {
  pause();
  run = data.runs[index] || data.runs[0];
  hot = null;
  pinned = false;
  $("runs").value = data.runs.indexOf(run);
  $("total").textContent = run.num_pages - 1;
  $("slider").max = run.frames.length - 1;
  buildPool();
  drawChart();
  drawEffects();
  show(frame);
}

$("play").addEventListener("click", toggle);
$("first").addEventListener("click", () => go(0));
$("back").addEventListener("click", () => go(at - 1));
$("next").addEventListener("click", () => go(at + 1));
$("end").addEventListener("click", () => go(run.frames.length - 1));
$("slider").addEventListener("input", () => go(+$("slider").value));
$("runs").addEventListener("change", () => choose(+$("runs").value, 0));
$("effects").addEventListener("click", (e) => {
  if (e.target.dataset.effect) nextWith(e.target.dataset.effect);
});
for (const kind of ["pointerdown", "pointermove"])
  $("chart").addEventListener(kind, (e) => {
    if (!e.buttons) return;
    const box = $("chart").getBoundingClientRect();
    go(Math.floor(((e.clientX - box.left) / box.width) * run.frames.length));
  });
// A button that was clicked keeps no focus: the next space is meant for the movie.
document.addEventListener("click", (e) => {
  const button = e.target.closest("button");
  if (button && e.detail > 0) button.blur();
});
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.altKey || e.metaKey || e.target.matches("select")) return;
  const keys = { ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), Home: () => go(0),
    End: () => go(run.frames.length - 1), "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1), " ": toggle,
    Escape: letGo };
  if (!keys[e.key] || (e.key === " " && e.target.matches("button, summary"))) return;
  e.preventDefault();
  keys[e.key]();
});
window.addEventListener("resize", () => drawArrows(run.frames[at]));

data.runs.forEach((r, i) => {
  const option = make("option", "", r.name);
  option.value = i;
  $("runs").append(option);
});
$("runs-label").hidden = data.runs.length < 2;
$("player").hidden = false;
function follow() { // a link to a frame
  const wanted = new URLSearchParams(location.hash.slice(1));
  choose(+(wanted.get("run") || 0), +(wanted.get("frame") || 1) - 1);
}

window.addEventListener("hashchange", follow);
follow();
