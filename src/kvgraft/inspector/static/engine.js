// What lies in the engine; asked for only while it is looked at.
import { svgElement, tableRows, whole } from "./elements.js";

const PERIOD_MS = 2000;
const WIDTH = 1000;
const LEVEL = 18;

export class EngineView {
  #details;
  #timer = 0;

  constructor(details) {
    this.#details = details;
    details.addEventListener("toggle", () => this.#ask());
    document.addEventListener("visibilitychange", () => this.#ask());
  }

  async #ask() {
    clearTimeout(this.#timer);
    if (!this.#details.open || document.hidden) return;
    const answer = await fetch("api/engine").catch(() => null);
    if (answer?.ok) this.#show(await answer.json());
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), PERIOD_MS);
  }

  #show(found) {
    const element = (id) => document.getElementById(id);
    element("engine-none").hidden = found !== null;
    element("engine-parts").hidden = found === null;
    if (found === null) return;
    const live = found.requests.map((request) => [
      request.request_id, request.state, whole(request.prompt_tokens), whole(request.reused_tokens),
      whole(request.output_tokens), `${request.age_s.toFixed(1)} s`,
    ]);
    element("live-count").textContent = whole(found.num_requests);
    element("live").hidden = live.length === 0;
    element("live").replaceChildren(...tableRows(["request", "state", "prompt", "reused", "generated", "age"], live));
    const donors = found.donors.map((donor) => [
      donor.donor_id, whole(donor.num_tokens), donor.tier, donor.value.toFixed(2), whole(donor.saved_tokens), donor.generation,
    ]);
    element("donor-count").textContent =
      found.donors.length < found.num_donors ? `the best ${found.donors.length} of ${whole(found.num_donors)}` : whole(found.num_donors);
    element("donors").replaceChildren(
      ...tableRows(["donor", "tokens", "memory", "value", "tokens saved", "generation"], donors),
    );
    const audits = found.audits.map((audit) => [
      new Date(1000 * audit.at).toLocaleTimeString(), audit.request_id, audit.reuse_class, audit.part, audit.notch,
      `${audit.loss.toFixed(3)} (${audit.loss_kind})`, audit.event.replaceAll("_", " "),
    ]);
    element("audits-part").hidden = audits.length === 0;
    element("audits").replaceChildren(...tableRows(["time", "request", "reuse class", "part", "notch", "loss", "what followed"], audits));
    element("prefix-count").textContent = `${whole(found.prefixes.length)} nodes`;
    element("icicle").replaceChildren(icicle(found.prefixes));
  }
}

// Nodes come parents first; the width of one is what lies in it and under it, in tokens.
function icicle(nodes) {
  const totals = nodes.map((node) => node[1]);
  for (let index = nodes.length - 1; index >= 0; index--) {
    if (nodes[index][0] >= 0) totals[nodes[index][0]] += totals[index];
  }
  const all = nodes.reduce((sum, node, index) => (node[0] < 0 ? sum + totals[index] : sum), 0);
  const places = [];
  const filled = new Map([[-1, 0]]);
  let depth = 0;
  const svg = svgElement("svg", { role: "img", "aria-label": `${whole(all)} tokens of exact prefixes` });
  nodes.forEach(([parent, tokens, isProtected], index) => {
    const left = parent < 0 ? filled.get(-1) : places[parent].left + filled.get(parent);
    const width = (WIDTH * totals[index]) / all;
    const level = parent < 0 ? 0 : places[parent].level + 1;
    places.push({ left, level });
    filled.set(parent, filled.get(parent) + width);
    filled.set(index, 0);
    depth = Math.max(depth, level + 1);
    const shape = { x: left, y: level * LEVEL, width, height: LEVEL, class: isProtected ? "protected" : "" };
    svg.append(svgElement("rect", shape, [svgElement("title", {}, `${whole(tokens)} tokens, ${whole(totals[index])} with what follows`)]));
  });
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${Math.max(1, depth) * LEVEL}`);
  return svg;
}
