// Figures of this moment.
import { htmlElement, tableRows, whole } from "./elements.js";

const bytes = (count) => (count < 2 ** 20 ? `${whole(count / 1024)} KiB` : `${(count / 2 ** 20).toFixed(1)} MiB`);
const REUSED = ["prefix", "continued", "segment", "substituted"];

export function showFigures(list, news) {
  const state = news.state;
  const tokens = state.tokens ?? {};
  const all = Object.values(tokens).reduce((sum, count) => sum + count, 0);
  const reused = REUSED.reduce((sum, kind) => sum + (tokens[kind] ?? 0), 0);
  const figures = [
    ["running", state.running, whole],
    ["waiting", state.waiting, whole],
    ["requests that ended", news.newest, whole],
    ["prompt tokens reused", all ? reused / all : undefined, (share) => `${(100 * share).toFixed(1)} %`],
    ["donors", state.donors, whole],
    ["donor tokens", state.donor_tokens, whole],
    ["host memory of donors", state.host_bytes, bytes],
    ["sessions", state.sessions, whole],
    ["texts to heal", state.heal_candidates, whole],
    ["failures of reuse", state.errors, whole],
    ["grafts", state.refused ? 1 : undefined, () => "refused"],
  ];
  const shown = figures.filter(([, value]) => value !== undefined);
  list.replaceChildren(
    ...shown.map(([name, value, form]) => htmlElement("div", {}, [htmlElement("dt", {}, name), htmlElement("dd", {}, form(value))])),
  );
}

export function showRisk(place, risk) {
  if (!risk) return place.replaceChildren();
  const rows = Object.entries(risk).map(([name, facts]) => [
    name,
    facts.notch ?? "",
    facts.status ?? "",
    whole(facts.audits ?? 0),
    facts.certified < 1 ? facts.certified.toFixed(3) : "none yet",
  ]);
  const table = htmlElement("table", {}, tableRows(["reuse class and part", "notch", "status", "audits", "certified mean loss"], rows));
  return place.replaceChildren(htmlElement("h3", {}, "Risk"), htmlElement("div", { class: "scroll" }, [table]));
}
