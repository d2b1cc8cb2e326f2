"use strict";
document.documentElement.classList.add("js");
const numbers = JSON.parse(document.getElementById("numbers").textContent);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector, within = document) => within.querySelector(selector);
all("[data-tools]").forEach((tools) => { tools.hidden = false; });

// Tables of numbers, made when a stage is opened.

const FIRST_COLUMNS = ["tap", "status", "times too far off", "worst group", "reason"];
const make = (tag, text, attributes = {}) => {
  const element = document.createElement(tag);
  if (text !== null && text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};
const shown = (value) => (value === null || value === undefined ? "–" : String(value));

const table = (columns, rows, caption, idOf) => {
  const scroll = make("div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
  const result = make("table");
  result.append(make("caption", caption));
  const head = make("tr");
  columns.forEach((column, index) => {
    const cell = make("th", null, { scope: "col" });
    const button = make("button", column, { type: "button", title: "Sort" });
    let sign = -1;
    button.addEventListener("click", () => {
      sign = -sign;
      const body = one("tbody", result);
      const sorted = [...rows].sort((a, b) => {
        const [x, y] = [a, b].map((row) => row[index] ?? (row[1] === "fail" ? Infinity : -Infinity)); // no number comes first
        if (x === y) return 0;
        return sign * (typeof x === "number" && typeof y === "number" ? (y > x ? 1 : -1) : String(x).localeCompare(String(y)));
      });
      body.replaceChildren(...sorted.map((row) => lines.get(row)));
      all("th", head).forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", sign > 0 ? "descending" : "ascending");
    });
    cell.append(button);
    head.append(cell);
  });
  const lines = new Map(rows.map((row) => {
    const line = make("tr", null, idOf ? { id: idOf(row), class: row[1] } : {});
    row.forEach((value, index) => {
      const cell = index ? make("td", shown(value)) : make("th", shown(value), { scope: "row" });
      if (typeof value === "number") cell.className = "number";
      if (columns[index] === "reason") cell.className = "wrap";
      line.append(cell);
    });
    return [row, line];
  }));
  const top = make("thead");
  top.append(head);
  const body = make("tbody");
  body.append(...lines.values());
  result.append(top, body);
  scroll.append(result);
  return scroll;
};

const chosen = new Set(FIRST_COLUMNS);
const tapTable = (stage) => {
  const kept = numbers.columns.map((name, index) => [name, index]).filter(([name]) => chosen.has(name));
  const rows = numbers.stages[stage].taps.map((row) => kept.map(([, index]) => row[index]));
  return table(kept.map(([name]) => name), rows, `Taps of ${stage}`, (row) => `${stage}/${row[0]}`);
};
const choice = () => {
  const details = make("details");
  details.append(make("summary", "Columns"));
  const names = make("div", null, { class: "tools" });
  for (const name of numbers.columns.slice(1)) {
    const label = make("label");
    const box = make("input", null, { type: "checkbox" });
    box.checked = chosen.has(name);
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(name); else chosen.delete(name);
      all(".numbers[data-made]").forEach((where) => { one(".taps", where).replaceChildren(tapTable(where.dataset.stage)); });
    });
    label.append(box, ` ${name}`);
    names.append(label);
  }
  const words = make("p", null, { class: "soft" });
  words.append(make("a", "What R, noise and the others mean", { href: "#words" }));
  details.append(names, words);
  return details;
};
const fold = (title, ...content) => {
  const details = make("details");
  details.append(make("summary", title), ...content);
  return details;
};
const SIDES = ["mean", "std", "min", "max", "NaN", "Inf"];
const STATISTICS = ["tap", ...SIDES.map((name) => `golden ${name}`), ...SIDES.map((name) => `port ${name}`),
  "left out: elements", "left out: R", "left out: rel L2", "left out: max abs"];

const fill = (where) => {
  if (where.dataset.made) return;
  where.dataset.made = "1";
  const stage = where.dataset.stage;
  const { taps, statistics, plot } = numbers.stages[stage];
  if (taps.length) {
    const holder = make("div", null, { class: "taps" });
    holder.append(tapTable(stage));
    where.append(holder, choice());
  }
  if (statistics.length)
    where.append(fold("Tensor statistics, and tokens that the comparison leaves out", table(STATISTICS, statistics, `Statistics of ${stage}`)));
  if (plot) {
    const tokens = plot.tokens.flatMap((row, prompt) => row.map((R, position) => [prompt, position, R])).filter((row) => row[2] !== null);
    where.append(fold("Numbers of the plot",
      table(["size of the error", "port", "golden"], plot.histogram, "Elements by the size of their error"),
      table(["quantile", "port", "golden"], plot.quantiles, "Quantiles of the errors"),
      table(["prompt", "position", "R"], tokens, "R by token")));
  }
};

// Stages: open, find, filter, order.

const stages = all("section.stage");
const detailsOf = new Map(stages.map((stage) => [one("summary", stage).id, one("details", stage)]));
for (const details of detailsOf.values())
  details.addEventListener("toggle", () => { if (details.open) fill(one(".numbers", details)); });

const reveal = () => {
  if (location.hash === "#words") one("#words + details").open = true;
  const id = decodeURIComponent(location.hash.slice(1));
  const details = detailsOf.get(id.split("/")[0]);
  if (!details) return;
  details.closest("section").hidden = false;
  details.open = true;
  fill(one(".numbers", details));
  all("tr.target").forEach((row) => row.classList.remove("target"));
  const row = document.getElementById(id) || one("summary", details);
  if (row.tagName === "TR") row.classList.add("target");
  row.scrollIntoView({ block: "center" });
};
addEventListener("hashchange", reveal);
addEventListener("click", (event) => {
  const link = event.target.closest && event.target.closest('a[href^="#"]');
  if (link && link.getAttribute("href") === location.hash) reveal(); // the same place once more
});

const filters = new Set();
const search = one("[data-search]");
const select = () => {
  const words = search.value.toLowerCase();
  let count = 0;
  for (const stage of stages) {
    stage.hidden = (filters.size && !filters.has(stage.dataset.status)) || !stage.dataset.text.toLowerCase().includes(words);
    count += !stage.hidden;
  }
  one("[data-shown]").textContent = `${count} of ${stages.length} stages`;
};
for (const button of all("[data-filter]"))
  button.addEventListener("click", () => {
    const name = button.dataset.filter;
    if (filters.has(name)) filters.delete(name); else filters.add(name);
    button.setAttribute("aria-pressed", filters.has(name));
    select();
  });
search.addEventListener("input", select);
one("[data-order]").addEventListener("change", (event) => {
  const sorted = event.target.value === "worst" ? [...stages].sort((a, b) => b.dataset.excess - a.dataset.excess) : stages;
  one("[data-stages]").append(...sorted);
});
for (const button of all("[data-open]"))
  button.addEventListener("click", () => stages.forEach((stage) => { if (!stage.hidden) one("details", stage).open = button.dataset.open === "true"; }));

// Failures by key, the map by arrows.

const findings = all(".finding");
let at = -1;
const step = (by) => {
  if (!findings.length) return;
  at = (at + by + findings.length + (at < 0 && by < 0)) % findings.length;
  findings[at].scrollIntoView({ block: "start" });
  findings[at].focus({ preventScroll: true });
};
for (const button of all("[data-step]")) button.addEventListener("click", () => step(Number(button.dataset.step)));
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "n") step(1);
  if (event.key === "p") step(-1);
  if (event.key === "/") { event.preventDefault(); search.focus(); }
});

const grid = all(".map tbody tr").map((row) => all("td", row).map((cell) => one("a", cell)));
const cells = grid.flat().filter(Boolean);
const start = cells.find((cell) => cell.closest("td").matches(".e, .f, .g, .h, .i, .x, .error")) || cells[0];
if (start) start.tabIndex = 0;
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
one(".map").addEventListener("keydown", (event) => {
  const move = MOVES[event.key];
  if (!move || event.target.tagName !== "A") return;
  let row = grid.findIndex((line) => line.includes(event.target));
  if (row < 0) return;
  let column = grid[row].indexOf(event.target);
  event.preventDefault();
  do { row += move[0]; column += move[1]; } while (grid[row] && column >= 0 && column < grid[row].length && !grid[row][column]);
  const next = grid[row] && grid[row][column];
  if (!next) return;
  cells.forEach((cell) => { cell.tabIndex = -1; });
  next.tabIndex = 0;
  next.focus();
});

// Copy, download, theme.

const copy = async (text) => {
  try { await navigator.clipboard.writeText(text); } catch { // a page from a file may not have the clipboard
    const area = make("textarea", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
};
for (const button of all("[data-copy], [data-link]"))
  button.addEventListener("click", async () => {
    await copy(button.dataset.copy ?? location.href.replace(/#.*/, "") + button.dataset.link);
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1500);
  });
for (const button of all("[data-download]"))
  button.addEventListener("click", () => {
    const link = make("a", null, { href: one("img", button.closest("figure")).src, download: button.dataset.download });
    link.click();
  });
const THEMES = ["system", "light", "dark"];
const keep = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } }, set: (value) => { try { localStorage.setItem("theme", value); } catch { /* not kept */ } } };
const button = one("[data-theme-switch]");
const use = (theme) => {
  if (theme === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
};
use(THEMES.includes(keep.get()) ? keep.get() : "system");
button.addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(button.textContent.slice(7)) + 1) % THEMES.length];
  use(theme);
  keep.set(theme);
});
addEventListener("beforeprint", () => all(".finding details").forEach((details) => { details.open = true; }));
select();
reveal();
