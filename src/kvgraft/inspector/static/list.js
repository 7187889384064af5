// The list of requests, the newest first, and the view of the one that was chosen.
import { htmlElement, svgElement, whole } from "./elements.js";

const CELLS = 240;
const MOST_ROWS = 10000;

export class RequestList {
  #list = document.getElementById("list");
  #none = document.getElementById("none");
  #older = document.getElementById("older");
  #text = document.getElementById("text");
  #reuse = document.getElementById("reuse");
  #detail = document.getElementById("detail-section");
  #epoch = "";
  #newest = 0;
  #asked = 0;

  constructor() {
    let pause = 0;
    this.#text.addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(() => this.#reload(), 200);
    });
    this.#reuse.addEventListener("change", () => this.#reload());
    this.#older.addEventListener("click", () => this.#load(this.#oldest()));
    document.getElementById("close").addEventListener("click", () => this.#close());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#close());
    this.#list.addEventListener("click", (event) => this.#choose(event.target.closest("a")));
    this.#list.addEventListener("keydown", (event) => this.#move(event));
  }

  // What the server tells once a second: requests behind those that are shown.
  take(news) {
    const isNew = news.epoch !== this.#epoch;
    const oldest = news.requests.at(-1)?.number ?? news.newest + 1;
    const hasGap = !isNew && oldest > this.#newest + 1 && news.newest > this.#newest;
    this.#epoch = news.epoch;
    const fresh = news.requests.filter((request) => isNew || request.number > this.#newest);
    this.#newest = news.newest;
    if (isNew || hasGap) {
      this.#reload();
      return;
    }
    const rows = fresh.filter((request) => this.#takes(request)).map((request) => this.#row(request));
    this.#list.prepend(...rows);
    while (this.#list.children.length > MOST_ROWS) this.#list.lastChild.remove();
    this.#none.hidden = this.#list.children.length > 0;
  }

  #takes(request) {
    if (this.#reuse.value && request.reuse !== this.#reuse.value) return false;
    const text = this.#text.value.toLowerCase();
    return [request.id, request.outcome, request.miss, request.why].some((part) => part.toLowerCase().includes(text));
  }

  #oldest() {
    return Number(this.#list.lastElementChild?.dataset.number ?? 0);
  }

  #reload() {
    this.#list.replaceChildren();
    return this.#load(0);
  }

  async #load(before) {
    const asked = ++this.#asked;
    const query = new URLSearchParams({ before, text: this.#text.value, reuse: this.#reuse.value });
    const answer = await fetch(`api/requests?${query}`).catch(() => null);
    if (!answer?.ok || asked !== this.#asked) return;
    const { requests } = await answer.json();
    const known = new Set([...this.#list.children].map((item) => Number(item.dataset.number)));
    const unseen = requests.filter((request) => !known.has(request.number));
    this.#list.append(...unseen.map((request) => this.#row(request)));
    this.#older.hidden = requests.length < 200;
    this.#none.hidden = this.#list.children.length > 0;
  }

  #row(request) {
    const ended = new Date(1000 * request.ended);
    const link = htmlElement("a", { class: "row", href: `requests/${request.number}`, target: "detail" }, [
      htmlElement("time", { datetime: ended.toISOString() }, ended.toLocaleTimeString("en", { hourCycle: "h23" })),
      htmlElement("bdi", { class: "id", title: request.id }, request.id),
      htmlElement("span", { class: "number" }, whole(request.prompt_tokens)),
      htmlElement("span", { class: "number ttft" }, request.ttft_ms === null ? "" : `${request.ttft_ms.toFixed(0)} ms`),
      this.#bar(request),
      htmlElement("span", { class: "outcome" }, request.outcome),
      htmlElement("span", { class: "why", title: request.why }, request.why),
    ]);
    const item = htmlElement("li", {}, [link]);
    item.dataset.number = request.number;
    return item;
  }

  #bar(request) {
    const told = Object.entries(request.counts).filter(([, count]) => count).map(([kind, count]) => `${whole(count)} ${kind}`);
    const svg = svgElement("svg", { viewBox: `0 0 ${CELLS} 10`, preserveAspectRatio: "none", role: "img" });
    svg.setAttribute("aria-label", told.join(", ") || "no report");
    svg.append(svgElement("title", {}, told.join(", ") || "no report"));
    let at = 0;
    for (const [kind, cells] of request.bar) {
      svg.append(svgElement("rect", { class: kind, x: at, y: 0, width: cells, height: 10 }));
      at += cells;
    }
    return svg;
  }

  #choose(link) {
    if (!link) return;
    this.#list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    link.setAttribute("aria-current", "true");
    this.#detail.hidden = false;
    this.#detail.scrollIntoView({ block: "nearest" });
  }

  #close() {
    if (this.#detail.hidden) return;
    this.#detail.hidden = true;
    this.#list.querySelector("[aria-current]")?.focus();
  }

  #move(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const next = step && event.target.closest("li")?.[step]?.querySelector("a");
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}
