// The page: what a run is, its charts and rollouts. `source` gives the data: from inside a report, or from the server.

const main = document.getElementById("main");
const inside = JSON.parse(document.getElementById("data").textContent);
const live = inside === null;
const PATIENCE = 30000; // milliseconds for an answer of the server

async function ask(path, query) {
  const token = new URLSearchParams(location.search).get("token");
  const answer = await fetch(path + "?" + new URLSearchParams({ ...query, token }), { signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300) || "the server answered " + answer.status);
  return answer.json();
}

const offline = {
  charts: async (run) => inside.runs[run].charts,
  rollouts: (run) => async (query) => ({ rollouts: filterRollouts(inside.runs[run].rollouts, query), next: null }),
  episode: (run) => async (head) => {
    const cards = inside.runs[run].rollouts.filter((card) => card.episode === head.episode);
    return { cards, chosen: cards.indexOf(head) };
  },
};
const online = {
  charts: (run, zoom) => ask("charts", { run, ...(zoom ? { low: zoom[0], high: zoom[1] } : {}) }),
  rollouts: (run) => (query, next) => ask("rollouts", { run, ...query, ...(next ? { next } : {}) }),
  episode: (run) => (head) => ask("rollout", { run, at: head.at }),
};
const source = live ? online : offline;

const state = { runs: live ? [] : inside.runs, charts: [], hidden: new Set(), run: 0, zoom: null, smoothing: 1 / 15 };
const colour = (run) => "c" + ((run % 8) + 1);
const place = Object.fromEntries(["head", "alarms", "comparison", "hero", "sets", "learning", "phases", "waits", "rollouts", "recipe"].map((name) => [name, element("section")]));

function build() {
  const zoomed = element("button", { id: "unzoom", type: "button", hidden: true, onclick: () => zoom(null) }, "all steps");
  const slider = element("input", { id: "smoothing", type: "range", min: 0, max: 0.5, step: 0.01, value: state.smoothing, oninput: (event) => {
    state.smoothing = +event.target.value;
    drawCharts();
  } });
  main.replaceChildren(
    element("header", {}, element("div", {}, element("span", { class: "mark" }, "WHET"), place.head),
      element("button", { id: "theme", type: "button", onclick: toggleTheme }, "Light / dark")),
    place.alarms, place.comparison, place.hero,
    element("h2", {}, "Learning"),
    element("div", { class: "controls" }, element("label", {}, "Smoothing ", slider), zoomed,
      element("span", { class: "none" }, "Drag in a chart to see a range of steps; a double click shows all.")),
    element("div", { id: "legend", class: "keys" }), place.learning, place.sets,
    element("h2", {}, "Time per step"), place.phases, place.waits, place.rollouts, place.recipe,
    element("footer", {}, "What each number means, and when to worry, is in docs/metrics.md of whet."));
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme:dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

function zoom(range) {
  state.zoom = range;
  document.getElementById("unzoom").hidden = !range;
  loadCharts();
}

async function loadCharts() {
  const zoomAsked = state.zoom;
  const versions = state.runs.map((run) => run.version);
  const loaded = await Promise.all(versions.map(async (version, run) => {
    try {
      return { ...await source.charts(run, zoomAsked), version };
    } catch { // the next event asks again
      return state.charts[run] || null;
    }
  }));
  if (zoomAsked !== state.zoom) return;
  state.charts = loaded;
  drawCharts();
}

function cut(curve) {
  if (!state.zoom) return curve;
  const [low, high] = state.zoom, inRange = curve.x.map((step) => step >= low && step <= high);
  const keep = (values) => values && values.filter((_, i) => inRange[i]);
  return { ...curve, x: keep(curve.x), y: keep(curve.y), low: keep(curve.low), high: keep(curve.high), broken: curve.broken.filter((step) => step >= low && step <= high) };
}

// Charts of the same metric in one box: with several runs, each has its colour.
function drawCharts() {
  const several = state.runs.length > 1, boxes = new Map();
  const options = { ...state, onzoom: zoom };
  const group = (name) => {
    boxes.clear();
    state.charts.forEach((charts, run) => {
      for (const chart of charts && !state.hidden.has(run) ? [charts[name]].flat().filter(Boolean) : []) {
        if (!boxes.has(chart.key)) boxes.set(chart.key, { chart, curves: [] });
        chart.lines.forEach((line, i) => boxes.get(chart.key).curves.push({ ...cut(line), colour: several ? colour(run) : "c" + (i + 1),
          dash: several && i > 0, name: several ? state.runs[run].folder + (chart.lines.length > 1 ? " " + line.name : "") : line.name }));
      }
    });
    return [...boxes.values()].map(({ chart, curves }) => chartBox(chart, curves.filter((curve) => curve.x.length || curve.broken.length), options, several));
  };
  const box = (boxesOf) => element("div", { class: "charts" }, ...boxesOf);
  const learning = group("learning"), sets = group("sets"), waits = group("waits");
  place.learning.replaceChildren(learning.length ? box(learning) : element("p", { class: "none" }, "No step is complete yet."));
  const one = state.runs[state.run];
  place.sets.replaceChildren(one.silent.length ? element("p", { class: "sub quiet" }, `Not drawn, because nothing happens there: ${one.silent.join(", ")}.`) : "",
    ...(one.sets.length ? [element("h2", {}, "Environments and sets"), element("div", { class: "box" }, table(one.sets)), box(sets)] : []));
  place.waits.replaceChildren(...(waits.length ? [element("h2", {}, "Idle time and goodput"),
    element("p", { class: "sub note" }, "Shares of each step's time; and of the tokens that were sampled, those that were trained."), box(waits)] : []));
  drawPhases(options);
}

function chartBox(chart, curves, options, several) {
  const keys = !several && (curves.length > 1 || curves.some((curve) => curve.interval));
  return element("div", { class: "box", "data-key": chart.key },
    element("h3", {}, chart.label, several ? "" : element("span", { class: chart.hot ? "hot" : "" }, chart.last)),
    curves.length ? lineChart(curves, chart, options) : element("p", { class: "none" }, "no values in this range"),
    keys ? element("div", { class: "keys" }, ...curves.map((curve) => element("span", {}, element("i", { class: curve.colour }),
      curve.name + (curve.interval ? ", with 95% interval" : "")))) : "");
}

function drawPhases(options) {
  const charts = state.charts[state.run];
  if (!charts || !charts.phases.x.length) return place.phases.replaceChildren(element("p", { class: "none" }, "not reported"));
  const { x, layers, sums } = charts.phases, whole = Object.values(sums).reduce((a, b) => a + b, 0);
  const inRange = x.map((step) => !state.zoom || (step >= state.zoom[0] && step <= state.zoom[1]));
  const keep = (values) => values.filter((_, i) => inRange[i]);
  const shown = { x: keep(x), layers: Object.fromEntries(Object.entries(layers).map(([name, values]) => [name, keep(values)])) };
  place.phases.replaceChildren(element("div", { class: "box" }, shown.x.length ? phaseChart(shown, options) : "",
    element("div", { class: "keys" }, ...Object.entries(sums).map(([name, sum]) => element("span", {}, element("i", { class: "p-" + name }),
      name + " ", element("b", {}, Math.round((100 * sum) / whole) + "%"), " " + seconds(sum))))));
}

// Which runs are drawn, and whose facts and rollouts are shown.
function drawLegend() {
  const legend = document.getElementById("legend");
  if (state.runs.length < 2) return legend.replaceChildren();
  legend.replaceChildren(...state.runs.map((run, i) => element("label", {}, element("input", { type: "checkbox", checked: !state.hidden.has(i), onchange: () => {
    if (!state.hidden.delete(i)) state.hidden.add(i);
    drawCharts();
  } }), element("i", { class: colour(i) }), run.folder)),
    element("label", {}, "facts and rollouts of ", element("select", { id: "by-run", onchange: (event) => {
      state.run = +event.target.value;
      drawFacts();
      drawCharts();
      drawRollouts();
    } }, ...state.runs.map((run, i) => element("option", { value: i, selected: i === state.run }, run.folder)))));
}

function drawFacts() {
  const run = state.runs[state.run];
  document.title = run.name + " · whet";
  const done = run.state ? `${run.state}, step ${run.step}${run.steps ? " of " + run.steps : ""}` : "";
  place.head.replaceChildren(element("h1", {}, state.runs.length > 1 ? run.folder : run.name), element("p", { class: "sub" }, run.short),
    done ? element("p", { class: "sub", id: "state" }, element("b", { class: "chip " + run.state }, run.state), done.slice(run.state.length + 1)
      + (run.read < 1 ? `; reading the metrics: ${Math.floor(100 * run.read)}%` : "")) : "");
  const named = (one, text) => (state.runs.length > 1 ? one.folder + ": " : "") + text;
  const alarms = state.runs.flatMap((one) => one.alarms.map(([what, why]) => element("li", {}, element("b", {}, named(one, what)), ": " + why)));
  place.alarms.replaceChildren(alarms.length ? element("ul", { class: "alarms", id: "alarms" }, ...alarms) : "");
  const { label, values, table: rows } = run.outcome;
  const turn = values.length ? element("div", { class: "turn" }, ...(values.length > 1 ? [element("span", { class: "from" }, values[0]), element("span", { class: "arrow" }, "→")] : []),
    element("span", { class: "to" }, values[values.length - 1])) : "";
  place.hero.replaceChildren(element("div", { class: "hero" }, element("div", { class: "box" }, element("p", { class: "label" }, label), turn, table(rows)),
    element("div", { class: "box" }, element("p", { class: "label" }, "run"), element("dl", { class: "facts-grid" }, ...run.rows.flatMap(([name, text]) =>
      [element("dt", {}, name), name === "command" ? element("dd", { class: "code" }, ...text.split(/( )/).map((word) => element("span", {}, word)))
        : element("dd", { class: name === "sandbox" ? "down" : "" }, text)])))),
    run.warnings.length ? element("div", { class: "warnings" }, element("b", {}, "Worth a look"), element("ul", {}, ...run.warnings.map(([name, text]) =>
      element("li", {}, element("b", {}, name), " " + text)))) : "");
  if (place.recipe.dataset.text !== run.recipe) {
    place.recipe.dataset.text = run.recipe;
    place.recipe.replaceChildren(...(run.recipe ? [element("h2", {}, "Recipe"), element("details", { class: "recipe box" }, element("summary", {}, "recipe.yaml"), element("pre", {}, run.recipe))] : []));
  }
}

function drawRollouts() {
  const run = state.runs[state.run], any = live ? run.recorded : run.rollouts.length;
  const list = any ? rolloutList({ rollouts: source.rollouts(state.run), episode: source.episode(state.run) })
    : run.samples ? element("p", { class: "none" }, "No rollouts are recorded: rollouts/ of the run folder is empty.") : "";
  place.rollouts.replaceChildren(...(list ? [element("h2", {}, "Rollouts"), list] : []));
  place.rollouts.dataset.any = any;
}

function follow() {
  const offlineNote = element("p", { class: "alarms", hidden: true, id: "lost" }, "The connection to whet watch is lost; the page shows what it had, and tries again.");
  document.body.prepend(offlineNote);
  let busy = false, again = false, drawn = performance.now();
  const charts = async () => {
    if (busy) return void (again = true);
    busy = true;
    const began = (drawn = performance.now());
    await loadCharts();
    setTimeout(() => { // at most a fifth of the time is spent on charts
      busy = false;
      if (again) charts((again = false));
    }, Math.max(1000, 4 * (performance.now() - began)));
  };
  const events = new EventSource("events" + location.search);
  events.onopen = () => { offlineNote.hidden = true; };
  events.onerror = () => { offlineNote.hidden = false; };
  events.onmessage = (event) => {
    const before = state.runs;
    state.runs = JSON.parse(event.data).runs;
    drawFacts();
    if (before.length !== state.runs.length) drawLegend();
    if (place.rollouts.dataset.any !== String(state.runs[state.run].recorded)) drawRollouts();
    const read = state.runs.every((run) => run.read === 1) || performance.now() - drawn > 10000; // not of a part of a long file
    if (read && state.runs.some((run, i) => run.version !== state.charts[i]?.version)) charts();
  };
}

function drawComparison({ table: rows, lines }) {
  place.comparison.replaceChildren(element("h2", {}, "Comparison"), element("div", { class: "box" }, table(rows)),
    ...lines.map((line) => element("p", { class: "sub" }, line)));
}

build();
if (live) follow();
else {
  if (inside.comparison) drawComparison(inside.comparison);
  drawFacts();
  drawLegend();
  loadCharts();
  drawRollouts();
}
