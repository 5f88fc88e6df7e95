"""Style, script and template of a document's HTML file; evaluation/html.py fills it in."""

STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --text: #1c2330; --soft: #5a6475; --line: #d9dee6; --link: #0b57a4;
  --good: #0f6b3c; --good-back: #dff3e7; --bad: #a3241b; --bad-back: #fbe4e2; --unsure: #7a4d00;
  --unsure-back: #fdf0d2; --muted-back: #e9ecf1; color-scheme: light;
}
:root[data-theme="dark"] {
  --page: #12161d; --card: #1b212b; --text: #e4e8ef; --soft: #a3adbd; --line: #333c4a; --link: #7db7f5;
  --good: #8fdcae; --good-back: #17392a; --bad: #f6aaa3; --bad-back: #47211f; --unsure: #f0cd83;
  --unsure-back: #40330f; --muted-back: #2a323f; color-scheme: dark;
}
@media (prefers-color-scheme: dark) {
  :root:not([data-theme="light"]) {
    --page: #12161d; --card: #1b212b; --text: #e4e8ef; --soft: #a3adbd; --line: #333c4a; --link: #7db7f5;
    --good: #8fdcae; --good-back: #17392a; --bad: #f6aaa3; --bad-back: #47211f; --unsure: #f0cd83;
    --unsure-back: #40330f; --muted-back: #2a323f; color-scheme: dark;
  }
  :root:not([data-theme="light"]) .in-light { display: none; }
  :root:not([data-theme="light"]) .in-dark { display: block; }
}
.in-dark { display: none; }
:root[data-theme="dark"] .in-light { display: none; }
:root[data-theme="dark"] .in-dark { display: block; }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body {
  margin: 0; background: var(--page); color: var(--text); overflow-wrap: break-word;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
header { display: flex; gap: 1rem; align-items: flex-start; justify-content: space-between; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
h4, h5, h6 { margin: 1.25rem 0 .5rem; }
p, ul { max-width: 48rem; }
a { color: var(--link); }
.subtitle, .caption, figcaption { color: var(--soft); }
button {
  flex: none; font: inherit; font-size: .85rem; color: var(--text); background: var(--card); cursor: pointer;
  border: 1px solid var(--line); border-radius: .5rem; padding: .35rem .7rem; min-height: 2.5rem;
}
nav { margin: 1.25rem 0; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .4rem; margin: 0; padding: 0; max-width: none; }
nav a {
  display: block; padding: .25rem .65rem; border: 1px solid var(--line); border-radius: 1rem; font-size: .85rem;
  background: var(--card); text-decoration: none;
}
.scroll {
  overflow-x: auto; margin: 1rem 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
}
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
.caption { margin: -.5rem .25rem 1.25rem; font-size: .82rem; max-width: 60rem; }
th, td { padding: .45rem .8rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 600; }
.stacked td, .stacked th { white-space: pre-line; min-width: 4rem; padding: .45rem .55rem; }
.stacked td.long { min-width: 10rem; }
.plain tbody th { min-width: 7rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { min-width: 5.5rem; }
.plain tbody th, .plain thead th:first-child { position: sticky; left: 0; background: var(--card); }
.tone { display: inline-block; padding: .05rem .55rem; border-radius: 1rem; white-space: nowrap; }
.good { color: var(--good); background: var(--good-back); }
.bad { color: var(--bad); background: var(--bad-back); }
.unsure { color: var(--unsure); background: var(--unsure-back); }
.muted { color: var(--soft); background: var(--muted-back); }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: .85em; }
td code, th code { overflow-wrap: anywhere; }
.stacked tbody th code { overflow-wrap: break-word; }
pre {
  overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem;
}
figure { margin: 1.25rem 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
figure { padding: .75rem; }
figure img { max-width: 100%; height: auto; margin: 0 auto; }
figure img:not(.in-dark) { display: block; }
figure img.on-white { background: #ffffff; border-radius: .3rem; }
.row {
  display: grid; gap: 1rem; margin: 1.25rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
}
.row figure { margin: 0; }
figcaption { font-size: .85rem; padding: .5rem .25rem 0; }
aside {
  max-width: 48rem; margin: 1rem 0; padding: .7rem 1rem; border-left: 4px solid var(--line);
  background: var(--muted-back); border-radius: .3rem;
}
aside.warning { border-color: var(--unsure); background: var(--unsure-back); color: var(--unsure); }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .35rem 0; }
@media (max-width: 46rem) {
  figure.wide { overflow-x: auto; }
  figure.wide img { max-width: none; width: 44rem; }
  main { padding: 1rem .8rem 3rem; }
  h1 { font-size: 1.35rem; }
  table.stacked, .stacked tbody, .stacked tr, .stacked th, .stacked td { display: block; }
  .stacked { width: 100%; }
  .stacked thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .stacked tr { padding: .6rem 0; border-top: 1px solid var(--line); }
  .stacked tr:first-child { border-top: 0; }
  .stacked th, .stacked td { border: 0; padding: .2rem .8rem; text-align: left; }
  .stacked td:empty, .stacked td.empty { display: none; }
  .stacked td::before { content: attr(data-label); display: block; font-size: .75rem; color: var(--soft); }
}
@media print {
  button, nav { display: none; }
  .scroll { overflow: visible; }
  figure, tr { break-inside: avoid; }
}
"""

SCRIPT = """
(function () {
  "use strict";
  var root = document.documentElement, button = document.getElementById("theme");
  var order = ["auto", "light", "dark"], key = "document-theme", theme = "auto";
  function read() { try { return localStorage.getItem(key); } catch (error) { return null; } }
  function keep() { try { localStorage.setItem(key, theme); } catch (error) { return; } }
  function show() {
    if (theme === "auto") { root.removeAttribute("data-theme"); } else { root.setAttribute("data-theme", theme); }
    button.textContent = "Theme: " + theme;
  }
  theme = order.indexOf(read()) < 0 ? "auto" : read();
  button.hidden = false;
  button.addEventListener("click", function () {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    keep();
    show();
  });
  show();
})();
"""

TEMPLATE = """\
{% macro show_cell(cell) %}
{%- set inner %}{% if cell.is_code %}<code>{{ cell.text }}</code>{% else %}{{ cell.text }}{% endif %}{% endset -%}
{% if cell.tone == "plain" %}{{ inner }}{% else %}<span class="tone {{ cell.tone }}">{{ inner }}</span>{% endif %}
{%- endmacro %}
{% macro show_table(table) %}
{% set is_number = table | number_columns %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ table.caption or table.columns | join(", ") }}">
<table class="{{ "stacked" if table.is_stacked else "plain" }}">
<thead><tr>
{% for column in table.columns %}
<th scope="col"{% if is_number[loop.index0] %} class="number"{% endif %}>{{ column }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{% for entry in row %}
{% set entry = entry | cell %}
{% if loop.first %}
<th scope="row">{{ show_cell(entry) }}</th>
{% else %}
<td data-label="{{ table.columns[loop.index0] }}" class="{{ "number" if is_number[loop.index0] }}\
{{ " empty" if not entry.text }}{{ " long" if entry | longest_line > 40 }}">{{ show_cell(entry) }}</td>
{% endif %}
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
{% if table.caption %}
<p class="caption">{{ table.caption }}</p>
{% endif %}
{% endmacro %}
{% macro show_picture(picture) %}
<figure{% if picture.is_wide %} class="wide" tabindex="0"{% endif %}>
{% if picture.dark_image %}
<img class="in-light" src="{{ picture.image | data_uri }}" alt="{{ picture.alt }}">
<img class="in-dark" src="{{ picture.dark_image | data_uri }}" alt="{{ picture.alt }}">
{% else %}
<img class="on-white" src="{{ picture.image | data_uri }}" alt="{{ picture.alt }}">
{% endif %}
{% if picture.caption %}
<figcaption>{{ picture.caption }}</figcaption>
{% endif %}
</figure>
{% endmacro %}
{% macro show(block, anchor) %}
{% set name = kind(block) %}
{% if name == "Heading" %}
<h{{ block.level }}{% if anchor %} id="{{ anchor }}"{% endif %}>{{ block.text }}</h{{ block.level }}>
{% elif name == "Paragraph" %}
<p>{{ block.text }}</p>
{% elif name == "Bullets" %}
<ul>
{% for item in block["items"] %}
<li>{{ item }}</li>
{% endfor %}
</ul>
{% elif name == "Table" %}
{{ show_table(block) }}
{% elif name == "Picture" %}
{{ show_picture(block) }}
{% elif name == "Row" %}
<div class="row">
{% for picture in block.pictures %}
{{ show_picture(picture) }}
{% endfor %}
</div>
{% elif name == "Note" %}
<aside class="{{ block.kind }}">{{ block.text }}</aside>
{% elif name == "Code" %}
<pre tabindex="0"><code>{{ block.text }}</code></pre>
{% else %}
<details><summary>{{ block.title }}</summary>
{% for inner in block.blocks %}
{{ show(inner, "") }}
{% endfor %}
</details>
{% endif %}
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{{ document.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
<div>
<h1>{{ document.title }}</h1>
{% if document.subtitle %}
<p class="subtitle">{{ document.subtitle }}</p>
{% endif %}
</div>
<button id="theme" type="button" hidden>Theme</button>
</header>
{% if sections | length > 2 %}
<nav aria-label="Sections"><ul>
{% for section in sections %}
<li><a href="#{{ anchors[section | identity] }}">{{ section.text }}</a></li>
{% endfor %}
</ul></nav>
{% endif %}
{% for block in document.blocks %}
{{ show(block, anchors[block | identity] if kind(block) == "Heading" else "") }}
{% endfor %}
</main>
<script>{{ script }}</script>
</body>
</html>
"""
