// Reads its data from attributes and writes text nodes only: nothing of the page can become markup again.
"use strict";

const tip = document.createElement("div");
tip.className = "tip";
document.body.append(tip);

function place(event) {
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const below = event.clientY + 18;
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (below + box.height > innerHeight ? event.clientY - box.height - 12 : below) + "px";
}

function hide() {
  tip.style.display = "none";
}

// Charts: the values of the nearest step.
for (const svg of document.querySelectorAll("svg.chart")) {
  const width = svg.viewBox.baseVal.width;
  const { low, high, left, right } = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, +v]));
  const inner = width - left - right;
  const series = [...svg.querySelectorAll("desc")].map(({ dataset }) => ({
    name: dataset.name,
    colour: dataset.colour,
    x: dataset.x.split(",").map(Number),
    y: dataset.y.split("|"),
  }));
  const steps = series.flatMap((one) => one.x);
  const cross = svg.querySelector(".cross");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = low + ((((event.clientX - box.left) * width) / box.width - left) / inner) * (high - low);
    const step = steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a), steps[0]);
    const x = left + inner * (high > low ? (step - low) / (high - low) : 0.5);
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    tip.textContent = "step " + step;
    for (const one of series) {
      const i = one.x.indexOf(step);
      if (i < 0) continue;
      const row = document.createElement("div");
      const key = document.createElement("i");
      key.className = one.colour;
      row.append(key, one.name + " " + one.y[i]);
      tip.append(row);
    }
    place(event);
  });
  svg.addEventListener("pointerleave", hide);
}

// Rollouts: both log-probs of a token, and which cards are shown in what order.
const cards = document.getElementById("cards");
if (cards) {
  const probability = (logprob) => logprob + "  (" + (100 * Math.exp(+logprob)).toPrecision(3) + "%)";
  cards.addEventListener("pointermove", (event) => {
    const token = event.target.dataset && event.target.dataset.t;
    if (!token) return hide();
    const [id, sampler, learner] = token.split("|");
    tip.textContent =
      "token " + id + "  " + JSON.stringify(event.target.textContent) +
      (sampler ? "\nsampler " + probability(sampler) : "") +
      (learner ? "\nlearner " + probability(learner) : "") +
      (sampler && learner ? "\ndifference " + (learner - sampler).toFixed(4) : "");
    place(event);
  });
  cards.addEventListener("pointerleave", hide);

  const all = [...cards.children];
  const pick = (id) => document.getElementById(id);
  const update = () => {
    const step = pick("by-step").value, kind = pick("by-kind").value, order = pick("by-order").value;
    const rank = (card) => (card.dataset[order] === undefined ? -Infinity : +card.dataset[order]);
    const sorted = order === "order" ? all : [...all].sort((a, b) => rank(b) - rank(a));
    let shown = 0;
    for (const card of sorted) {
      const fits = (!step || card.dataset.step === step) && (!kind || card.dataset.kind.split(" ").includes(kind));
      card.hidden = !fits;
      shown += fits;
      cards.append(card);
    }
    pick("count").textContent = shown + " rollouts";
  };
  for (const id of ["by-step", "by-kind", "by-order"]) pick(id).addEventListener("change", update);
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme:dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
