// Charts as SVG, from the data of whet/show/charts.py. A drag selects a range of steps for all charts.

const SIZE = { width: 460, wide: 960, height: 220, left: 58, right: 12, top: 10, bottom: 26 };

// The range of an axis: the values with a margin, clipped at 0 and 100%.
function padded(low, high, style) {
  const flat = high - low < 1e-3 * Math.abs(high);
  const pad = flat ? 0.05 * Math.abs(high) || 0.5 : 0.06 * (high - low) || 0.5;
  const bottom = low >= 0 ? Math.max(0, low - pad) : low - pad;
  return [bottom, style === "percent" && high <= 1 ? Math.min(1, high + pad) : high + pad];
}

function ticks(low, high, about) {
  const span = high - low;
  if (!span) return [low];
  const size = 10 ** Math.floor(Math.log10(span / about));
  const step = [1, 2, 5, 10].map((k) => size * k).find((one) => one * about >= span) || span;
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) made.push(+(step * i).toPrecision(12));
  return made;
}

// The centred mean over a share of the curve, by sums so that it costs the same for any share.
function smoothed(y, share) {
  const half = Math.round((share * y.length) / 2);
  if (half < 1) return y;
  const sums = [0];
  for (const value of y) sums.push(sums[sums.length - 1] + value);
  return y.map((_, i) => {
    const first = Math.max(0, i - half), end = Math.min(y.length, i + half + 1);
    return (sums[end] - sums[first]) / (end - first);
  });
}

// Axes that map a step and a value to coordinates, and the marks that every chart has.
function frame(range, low, high, style, wide) {
  const width = wide ? SIZE.wide : SIZE.width, inner = width - SIZE.left - SIZE.right;
  const tall = SIZE.height - SIZE.top - SIZE.bottom;
  const svg = shape("svg", { class: wide ? "chart wide" : "chart", viewBox: `0 0 ${width} ${SIZE.height}`, role: "img" });
  const x = (step) => +(SIZE.left + inner * (range[1] > range[0] ? (step - range[0]) / (range[1] - range[0]) : 0.5)).toFixed(1);
  const y = (value) => +(SIZE.height - SIZE.bottom - (tall * (value - low)) / (high - low || 1)).toFixed(1);
  for (const value of ticks(low, high, 5)) {
    svg.append(shape("line", { class: "grid", x1: SIZE.left, x2: width - SIZE.right, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { class: "tick", x: SIZE.left - 7, y: y(value) + 4, "text-anchor": "end" }, axisLabel(value, high - low, style)));
  }
  for (const step of ticks(range[0], range[1], width / 90).filter(Number.isInteger))
    svg.append(shape("text", { class: "tick", x: x(step), y: SIZE.height - 8, "text-anchor": "middle" }, number(step, "count")));
  const step = (event) => {
    const box = svg.getBoundingClientRect();
    const at = (((event.clientX - box.left) * width) / box.width - SIZE.left) / inner;
    return range[0] + Math.max(0, Math.min(1, at)) * (range[1] - range[0]);
  };
  return { svg, x, y, step, width };
}

// `curves`: [{name, colour, dash, x, y, low, high, interval, dots, broken}].
function lineChart(curves, { style, limits }, options) {
  const smooth = (curve) => (curve.dots ? curve.y : smoothed(curve.y, options.smoothing));
  const bounds = (curve) => (curve.interval ? [...curve.low, ...curve.high] : curve.y);
  const steps = curves.flatMap((curve) => [...curve.x, ...curve.broken]);
  const values = curves.flatMap(bounds);
  const range = options.zoom || [extreme(steps, Math.min), extreme(steps, Math.max)];
  const [bottom, top] = padded(extreme(values, Math.min), extreme(values, Math.max), style);
  const drawn = frame(range, bottom, top, style, false);
  const { svg, x, y } = drawn;
  const path = (xs, ys) => xs.map((step, i) => x(step) + "," + y(ys[i])).join(" ");
  for (const limit of limits.filter((value) => value > bottom && value < top))
    svg.append(shape("line", { class: "limit", x1: SIZE.left, x2: drawn.width - SIZE.right, y1: y(limit), y2: y(limit) }));
  for (const curve of curves) {
    const colour = curve.colour + (curve.dash ? " dash" : "");
    if (curve.low && curve.x.length > 1)
      svg.append(shape("polygon", { class: "band " + curve.colour, points: path([...curve.x, ...[...curve.x].reverse()],
        [...curve.high, ...[...curve.low].reverse()].map((value) => Math.max(bottom, Math.min(top, value)))) }));
    const even = smooth(curve);
    if (even !== curve.y) svg.append(shape("polyline", { class: "raw " + colour, points: path(curve.x, curve.y) }));
    svg.append(shape("polyline", { class: "line " + colour, points: path(curve.x, even) }));
    if (curve.dots || curve.x.length === 1)
      curve.x.forEach((step, i) => svg.append(shape("circle", { class: curve.colour, cx: x(step), cy: y(curve.y[i]), r: 3 })));
    for (const step of curve.broken) {
      const mark = shape("path", { class: "broken", d: `M${x(step) - 4} ${SIZE.top}l8 8m0-8l-8 8` });
      mark.append(shape("title", {}, `step ${step}: not finite`));
      svg.append(mark);
    }
  }
  listen(drawn, range, options, steps, (step) => curves.flatMap((curve) => {
    const i = curve.x.indexOf(step);
    return i < 0 ? [] : [hint(curve.colour, curve.name + " " + number(curve.y[i], style)
      + (curve.low ? ` (${number(curve.low[i], style)} to ${number(curve.high[i], style)})` : ""))];
  }));
  return svg;
}

function extreme(values, choose) {
  return values.reduce((a, b) => choose(a, b), values[0]);
}

// Seconds per step as stacked bars, one layer per phase.
function phaseChart({ x: steps, layers }, options) {
  const range = options.zoom || [steps[0] - 0.5, steps[steps.length - 1] + 0.5];
  const names = Object.keys(layers);
  const sums = steps.map((_, i) => names.reduce((sum, name) => sum + layers[name][i], 0));
  const drawn = frame(range, 0, 1.06 * extreme(sums, Math.max), "seconds", true);
  const width = Math.max(0.5, (0.9 * (drawn.width - SIZE.left - SIZE.right)) / Math.max(1, steps.length));
  steps.forEach((step, i) => {
    let below = 0;
    for (const name of names) {
      const top = drawn.y(below + layers[name][i]);
      drawn.svg.append(shape("rect", { class: "p-" + name, x: drawn.x(step) - width / 2, width, y: top, height: Math.max(0, drawn.y(below) - top) }));
      below += layers[name][i];
    }
  });
  listen(drawn, range, options, steps, (step) => {
    const i = steps.indexOf(step);
    return names.map((name) => hint("p-" + name, name + " " + seconds(layers[name][i])));
  });
  return drawn.svg;
}

function hint(colour, text) {
  return element("div", {}, element("i", { class: colour }), text);
}

// The values at the nearest step, and a drag for the zoom.
function listen({ svg, x, step }, range, options, steps, hints) {
  const cross = shape("line", { class: "cross", x1: 0, x2: 0, y1: SIZE.top, y2: SIZE.height - SIZE.bottom });
  const chosen = shape("rect", { class: "chosen", x: 0, width: 0, y: SIZE.top, height: SIZE.height - SIZE.top - SIZE.bottom });
  svg.append(cross, chosen);
  let from = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = step(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const at = step(event);
    const near = steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a), steps[0]);
    cross.setAttribute("x1", x(near));
    cross.setAttribute("x2", x(near));
    if (from !== null) {
      chosen.setAttribute("x", Math.min(x(from), x(at)));
      chosen.setAttribute("width", Math.abs(x(at) - x(from)));
    }
    showTip(event, "step " + near, ...hints(near));
  });
  svg.addEventListener("pointerup", (event) => {
    const [low, high] = [from, step(event)].sort((a, b) => a - b);
    from = null;
    chosen.setAttribute("width", 0);
    if (x(high) - x(low) > 8) options.onzoom([Math.max(0, Math.floor(low)), Math.ceil(high)]);
  });
  svg.addEventListener("pointercancel", () => {
    from = null;
    chosen.setAttribute("width", 0);
  });
  svg.addEventListener("pointerleave", hideTip);
  svg.addEventListener("dblclick", () => options.onzoom(null));
}
