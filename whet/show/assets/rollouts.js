// Rollouts: a list with filters, and cards with coloured tokens and a tree of the episode's branches and turns.

const LEVELS = [0.05, 0.2, 0.5, 1]; // of the difference of log-probs: whet/show/view.py
const UNLIKELY = [0.5, 1, 2, 4]; // of -log-prob, where the learner's is missing

function level(value, limits) {
  return limits.filter((limit) => value >= limit).length;
}

function tokenColour(sampler, learner) {
  if (sampler !== null && learner !== null) {
    const depth = level(Math.abs(learner - sampler), LEVELS);
    return depth ? (learner > sampler ? "u" : "d") + depth : "";
  }
  const one = learner ?? sampler;
  const depth = one === null ? 0 : level(-one, UNLIKELY);
  return depth ? "d" + depth : "";
}

function tokenTip([text, id, sampler, learner]) {
  const probability = (name, value) => value === null ? "" : `\n${name} ${value}  (${(100 * Math.exp(value)).toPrecision(3)}%)`;
  const both = sampler !== null && learner !== null;
  return `token ${id}  ${JSON.stringify(text)}` + probability("sampler", sampler) + probability("learner", learner)
    + (both ? `\nratio ${Math.exp(learner - sampler).toPrecision(4)}` : "");
}

function partBody(part) {
  const cut = part.cut ? element("p", { class: "none" }, `${part.cut} more ${part.tokens ? "tokens are" : "characters are"} in the rollouts folder`) : "";
  const images = part.images.map((src) => element("img", { class: "thumbnail", src, alt: "" }));
  if (!part.tokens) return element("div", { class: ["answer", "assistant"].includes(part.label) ? "answer" : "prompt" }, ...images, part.text, cut);
  return element("div", { class: "answer" }, ...part.tokens.map((token) => element("i", {
    class: tokenColour(token[2], token[3]), onpointermove: (event) => showTip(event, tokenTip(token)), onpointerleave: hideTip,
  }, token[0])), cut);
}

function partElements(part) {
  return [element("p", { class: "role" }, part.label + (part.facts ? " · " + part.facts : "")), partBody(part)];
}

function cardBody(card) {
  const folded = card.parts.filter((part) => part.folded);
  const earlier = folded.length ? element("details", { class: "earlier" },
    element("summary", {}, `${folded.length} earlier message${folded.length > 1 ? "s" : ""}`), ...folded.flatMap(partElements)) : "";
  const data = card.data.length ? element("p", { class: "data" }, element("b", {}, "task data"),
    ...card.data.map(([name, value]) => element("span", {}, `${name}: ${value}`))) : "";
  return element("div", { class: "body" }, earlier, ...card.parts.filter((part) => !part.folded).flatMap(partElements), data,
    card.error ? element("p", { class: "error" }, card.error) : "",
    element("p", { class: "scores" }, card.more.map(([name, value]) => name + " " + value).join(" · ")));
}

const words = (part) => part.tokens ? part.tokens.map((token) => token[0]).join("") : part.text;

// The turns of all branches, those that branches begin with in common once: [{part, branch, index, children}].
function branchTree(cards) {
  const root = [];
  cards.forEach((card, branch) => {
    let here = root;
    card.parts.forEach((part, index) => {
      const key = part.label + "\n" + words(part);
      let node = here.find((one) => one.key === key);
      if (!node) here.push((node = { key, part, branch, index, children: [] }));
      here = node.children;
    });
  });
  return root;
}

function treeElement(nodes, select) {
  const chain = [];
  while (nodes.length === 1) {
    chain.push(nodes[0]);
    nodes = nodes[0].children;
  }
  const line = (node) => element("li", {}, element("button", { type: "button", onclick: () => select(node) },
    element("b", {}, node.part.label), " " + words(node.part).slice(0, 70).replace(/\s+/g, " ")));
  const forks = nodes.map((node, i) => element("li", { class: "fork" }, `branch ${i + 1}`, treeElement([node], select)));
  return element("ul", { class: "tree" }, ...chain.map(line), ...forks);
}

// The body of a card: a tree if its episode has branches or several turns, and the chosen branch.
function episodeBody(cards, chosen) {
  const place = element("div");
  const show = (branch) => place.replaceChildren(cardBody(cards[branch]));
  show(chosen);
  if (cards.length === 1 && cards[0].parts.filter((part) => !part.folded).length < 4) return place;
  const select = (node) => {
    show(node.branch);
    const shown = place.querySelectorAll(".role");
    const order = [...cards[node.branch].parts.filter((part) => part.folded), ...cards[node.branch].parts.filter((part) => !part.folded)];
    const target = shown[order.indexOf(cards[node.branch].parts[node.index])];
    if (target) {
      if (target.closest("details")) target.closest("details").open = true;
      target.scrollIntoView({ behavior: "smooth", block: "center" });
    }
  };
  return element("div", {}, element("details", { class: "earlier", open: cards.length > 1 },
    element("summary", {}, cards.length > 1 ? `${cards.length} branches` : "turns"), treeElement(branchTree(cards), select)), place);
}

function rolloutCard(head, episode) {
  const body = element("div");
  const details = element("details", { class: "card", ontoggle: async () => {
    if (!details.open || body.firstChild) return;
    try {
      const { cards, chosen } = await episode(head);
      body.replaceChildren(episodeBody(cards, chosen));
    } catch (error) {
      body.replaceChildren(element("p", { class: "error" }, error.message));
    }
  } }, element("summary", {},
    element("span", { class: "at" }, String(head.step)),
    element("span", { class: "task" }, head.task + " ", element("small", {}, head.number)),
    head.verdict ? element("b", { class: "chip " + head.verdict }, head.verdict) : "",
    head.status !== "completed" ? element("b", { class: "chip" }, head.ending) : "",
    element("span", { class: "preview" }, head.preview),
    element("span", { class: "facts" }, head.facts.map(([name, value]) => name + " " + value).join(" · "))), body);
  return details;
}

// The same filters as whet/watch/search.py, for the rollouts inside a report.
function filterRollouts(cards, query) {
  const text = (query.text || "").toLowerCase();
  const contains = (card) => [card.task, card.error, ...card.parts.map(words), ...card.data.flat()].some((one) => one.toLowerCase().includes(text));
  const fits = (card) => (!query.step || card.step === +query.step) && (!query.verdict || card.verdict === query.verdict)
    && (!query.status || card.status === query.status)
    && (!query.low || (card.order.reward !== null && card.order.reward >= +query.low))
    && (!query.high || (card.order.reward !== null && card.order.reward <= +query.high)) && (!text || contains(card));
  const found = cards.filter(fits);
  const rank = (card) => card.order[query.sort] ?? -Infinity;
  return query.sort ? [...found].sort((a, b) => rank(b) - rank(a)) : found;
}

// The list with its filters. `source.rollouts(query, next)` and `source.episode(head)` answer with promises.
function rolloutList(source) {
  const list = element("div", { id: "cards" }), count = element("span", { class: "count", id: "count" });
  const more = element("button", { type: "button", hidden: true, id: "more", onclick: () => load(true) }, "more");
  const query = {};
  let next = null, shown = 0, asked = 0;
  const load = async (further) => {
    const mine = ++asked;
    count.textContent = "searching ...";
    try {
      const found = await source.rollouts(query, further ? next : null);
      if (mine !== asked) return;
      if (!further) list.replaceChildren();
      shown = (further ? shown : 0) + found.rollouts.length;
      list.append(...found.rollouts.map((head) => rolloutCard(head, source.episode)));
      next = found.next;
      more.hidden = !next;
      more.textContent = found.note ? "search further" : "more";
      count.textContent = `${shown} rollouts${next ? " so far" : ""}${found.note ? "; " + found.note : ""}`;
    } catch (error) {
      if (mine === asked) count.textContent = error.message;
    }
  };
  let timer = 0;
  const input = (name, properties) => element("input", { id: "by-" + name, ...properties, oninput: (event) => {
    query[name] = event.target.value;
    clearTimeout(timer);
    timer = setTimeout(() => load(false), 250);
  } });
  const choice = (name, options) => element("select", { id: "by-" + name, onchange: (event) => {
    query[name] = event.target.value;
    load(false);
  } }, ...options.map(([value, text]) => element("option", { value }, text)));
  const same = (values) => [["", "all"], ...values.map((value) => [value, value])];
  const labelled = (text, ...fields) => element("label", {}, text + " ", ...fields);
  const controls = element("div", { class: "controls" },
    labelled("Step", input("step", { type: "number", min: 0, placeholder: "all" })),
    labelled("Grade", choice("verdict", same(["correct", "wrong"]))),
    labelled("Status", choice("status", same(["completed", "truncated", "failed"]))),
    labelled("Reward from", input("low", { type: "number", step: "any" })),
    labelled("to", input("high", { type: "number", step: "any" })),
    labelled("Text", input("text", { type: "search", placeholder: "task or words" })),
    labelled("Sort", choice("sort", [["", "as sampled"], ["reward", "reward"], ["advantage", "advantage"], ["length", "length"], ["mismatch", "disagreement"]])),
    element("span", { class: "legend" }, "more likely to the learner ", ...["u4", "u3", "u2", "u1", "", "d1", "d2", "d3", "d4"].map((colour) =>
      element("i", { class: colour || "plain" })), " less likely than to the sampler; without its log-probs: unlikely tokens"),
    count);
  load(false);
  return element("section", { id: "rollouts" }, controls, list, more);
}
