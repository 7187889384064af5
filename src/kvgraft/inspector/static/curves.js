// Curves of the last hour: what the server kept of it when the page was opened, and what it has told since.
const SPAN_S = 3600;
// A point that comes later than this belongs to no line with the one in front of it: the server was away.
const GAP_S = 20;
// Names that the metrics have, with those of the page and their colours.
const KINDS = [
  ["prefix", "exact", "--exact"],
  ["continued", "continued", "--continued"],
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

const CLOCK = { label: "Time", value: (_, at) => (at === null ? "--" : new Date(1000 * at).toLocaleTimeString()) };
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const compact = (_, values) => values.map((value) => (value === null ? "" : COMPACT.format(value)));
// Seconds only where labels are less than a minute apart.
const times = (_, values, axis, space, step) => {
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(step < 60 && { second: "2-digit" }) };
  return values.map((at) => new Date(1000 * at).toLocaleTimeString("en", parts));
};
// Asked for at each drawing: the browser may have turned dark since the last one.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const text = () => getComputedStyle(document.body).color;
const figure = (_, value) => (value === null ? "--" : value.toLocaleString("en", { maximumFractionDigits: 1 }));

export class Curves {
  #tokens;
  #slots;
  #last = null;

  constructor(tokens, slots) {
    this.#tokens = new Curve(tokens, KINDS);
    this.#slots = new Curve(slots, HOLDERS);
  }

  take(news) {
    for (const point of news.timeline ?? []) this.#add(news.epoch, point.at, point);
    this.#add(news.epoch, news.at, news.state);
    this.#tokens.draw();
    this.#slots.draw();
  }

  #add(epoch, at, { tokens, slots }) {
    if ((!tokens && !slots) || (this.#last && at <= this.#last.at)) return;
    const last = this.#last?.epoch === epoch ? this.#last : null;
    const counts = tokens ?? {};  // none before the first request
    if (last) this.#tokens.add(at, (kind) => Math.max(0, (counts[kind] ?? 0) - (last.counts[kind] ?? 0)) / (at - last.at));
    if (slots) this.#slots.add(at, (holder) => slots[holder] ?? 0);
    this.#last = { epoch, at, counts };
  }
}

class Curve {
  #plot;
  #data;
  #names;

  constructor(place, lines) {
    this.#names = lines.map(([name]) => name);
    this.#data = [[], ...this.#names.map(() => [])];
    const grid = { stroke: () => color("--pale") };
    const series = lines.map(([, label, name]) => {
      const stroke = () => color(name);
      return { label, stroke, width: 2, value: figure, points: { size: 4, fill: stroke } };
    });
    const options = {
      width: place.clientWidth || 300,
      height: 180,
      series: [CLOCK, ...series],
      legend: { markers: { stroke: (_, index) => `var(${lines[index - 1][2]})` } },
      axes: [{ stroke: text, grid, space: 80, values: times }, { stroke: text, grid, size: 50, values: compact }],
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(1, high ?? 1)] } },
    };
    this.#plot = new uPlot(options, this.#data, place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#plot.redraw(false));
    new ResizeObserver(() => this.#plot.setSize({ width: place.clientWidth, height: 180 })).observe(place);
  }

  add(at, value) {
    const times = this.#data[0];
    if (times.length && at - times.at(-1) > GAP_S) this.#push(times.at(-1) + GAP_S / 2, () => null);
    this.#push(at, value);
    while (times[0] < at - SPAN_S) this.#data.forEach((values) => values.shift());
  }

  draw() {
    this.#plot.setData(this.#data);
  }

  #push(at, value) {
    this.#data[0].push(at);
    this.#names.forEach((name, index) => this.#data[index + 1].push(value(name)));
  }
}
