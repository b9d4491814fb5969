// The report: figures and completions, from the data in the page. Inlined after draw.js.
import { FigureView, TOKEN_COLOURS, Topics, completionView, el, tokenLegend } from "./draw.js";

const told = JSON.parse(document.getElementById("run-data").textContent);
const columns = { steps: told.steps, values: told.columns };
const smooth = told.steps.length >= 20 ? 5 : 1;
const views = [];
const options = { smooth, log: false, zoom: null };

function zoomTo(range) {
  options.zoom = range;
  for (const view of views) view.update(view.figure, columns, options);
}

for (const figure of told.figures) views.push(new FigureView(figure, columns, options, zoomTo));
const topics = new Topics();
topics.place(views.map((view) => [view.figure.topic, view.node]));
document.getElementById("figures").replaceChildren(topics.node);

const shown = document.getElementById("completions");
if (shown) {
  const legend = el("div", {}, tokenLegend("drafted"));
  const parts = [];
  const choice = el("select", { onchange: () => {
    parts.forEach((part) => part.colour(choice.value));
    legend.replaceChildren(tokenLegend(choice.value));
  } }, ...TOKEN_COLOURS.map(([name, words]) => el("option", { value: name }, words)));
  shown.append(el("p", {}, el("label", {}, "Colour tokens by ", choice)), legend);
  for (const step of told.completions) {
    shown.append(el("h3", {}, `Step ${step.step}`), el("p", { class: "asked" }, step.question));
    for (const completion of step.completions) {
      parts.push(completionView(completion, "drafted"));
      shown.append(parts[parts.length - 1]);
    }
  }
}
