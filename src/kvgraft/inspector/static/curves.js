// Curves since the page was opened; half an hour at most.
const MOST_POINTS = 1800;
// Names that the metrics have, with those of the page and their colours.
const KINDS = [
  ["prefix", "exact", "--exact"],
  ["segment", "shifted", "--shifted"],
  ["substituted", "substituted", "--substituted"],
  ["recomputed", "recomputed", "--recomputed"],
  ["fresh", "computed", "--computed"],
];
const HOLDERS = [
  ["free", "free", "--line"],
  ["request", "requests", "--computed"],
  ["cached", "exact prefixes", "--exact"],
  ["donor", "donors", "--shifted"],
];

export class Curves {
  #tokens;
  #slots;
  #last = null;

  constructor(tokens, slots) {
    this.#tokens = new Curve(tokens, KINDS);
    this.#slots = new Curve(slots, HOLDERS);
  }

  take(epoch, state) {
    const now = Date.now() / 1000;
    const counts = state.tokens ?? {};
    if (this.#last?.epoch === epoch) {
      const seconds = Math.max(0.1, now - this.#last.now);
      const rate = (kind) => Math.max(0, (counts[kind] ?? 0) - (this.#last.counts[kind] ?? 0)) / seconds;
      this.#tokens.add(now, rate);
    }
    this.#last = { epoch, now, counts };
    if (state.slots) this.#slots.add(now, (holder) => state.slots[holder] ?? 0);
  }
}

class Curve {
  #plot;
  #data;
  #names;

  constructor(place, lines) {
    this.#names = lines.map(([name]) => name);
    this.#data = [[], ...this.#names.map(() => [])];
    const style = getComputedStyle(document.documentElement);
    const text = getComputedStyle(document.body).color;
    const grid = { stroke: style.getPropertyValue("--pale") };
    const options = {
      width: place.clientWidth || 300,
      height: 180,
      series: [{}, ...lines.map(([, label, color]) => ({ label, stroke: style.getPropertyValue(color), width: 2 }))],
      axes: [{ stroke: text, grid }, { stroke: text, grid, size: 60 }],
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(1, high ?? 1)] } },
    };
    this.#plot = new uPlot(options, this.#data, place);
    new ResizeObserver(() => this.#plot.setSize({ width: place.clientWidth, height: 180 })).observe(place);
  }

  add(now, value) {
    this.#data[0].push(now);
    this.#names.forEach((name, index) => this.#data[index + 1].push(value(name)));
    if (this.#data[0].length > MOST_POINTS) this.#data.forEach((values) => values.shift());
    this.#plot.setData(this.#data);
  }
}
