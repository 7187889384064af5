// The page: takes the server's news once a second and hands them to its parts.
import { Curves } from "./curves.js";
import { EngineView } from "./engine.js";
import { showFigures, showRisk } from "./figures.js";
import { RequestList } from "./list.js";

const element = (id) => document.getElementById(id);
const link = element("link");
const list = new RequestList();
const curves = new Curves(element("tokens"), element("slots"));
new EngineView(element("engine"));

const events = new EventSource("events");
events.addEventListener("open", () => setLink("live", false));
events.addEventListener("error", () => setLink("no answer; trying again", true));
events.addEventListener("message", (event) => {
  const news = JSON.parse(event.data);
  element("name").textContent = news.name;
  document.title = `kvgraft ${news.name}`;
  list.take(news);
  curves.take(news);
  showFigures(element("figures"), news);
  showRisk(element("risk"), news.state.risk);
});

function setLink(text, isLost) {
  link.textContent = text;
  link.classList.toggle("lost", isLost);
}
