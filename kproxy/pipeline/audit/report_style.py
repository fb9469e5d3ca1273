"""The report's style sheet: system fonts, light or dark as the reader has it, narrow on a phone, fit to print."""

from __future__ import annotations

from typing import Final

# Text on paper has a contrast of at least 7:1, muted text 4.5:1, whatever is drawn 3:1 against the paper around it.
STYLE: Final = """
:root { color-scheme: light dark;
  --paper:#ffffff; --raised:#f5f6f8; --ink:#16191d; --muted:#58606b; --line:#c9ced6;
  --good:#146c43; --bad:#b3261e; --warn:#8a5300; --idle:#58606b;
  --good-bg:#e3f4ea; --bad-bg:#fdeae8; --warn-bg:#fff1d6; --idle-bg:#eef0f3;
  --complete:#2f9e6e; --removed:#7f93ad; --unproven:#e8ae3c; --duplicated:#c2660a; --overlapped:#8430c2; --lost:#c8201a;
  --hatch:#16191d55;
  --owner-0:#8db8ea; --owner-1:#f3b77a; --owner-2:#93d3a4; --owner-3:#d8a4dd; --owner-4:#e5d36b; --owner-5:#8fd5d8;
  --owner-6:#f0a3a3; --owner-7:#bfb2ee; --owner-8:#c3c8cf; }
@media (prefers-color-scheme: dark) { :root {
  --paper:#14171b; --raised:#1d2127; --ink:#eceff3; --muted:#a4adb8; --line:#434b56;
  --good:#6fd6a0; --bad:#ff9a92; --warn:#f5c266; --idle:#a4adb8;
  --good-bg:#12301f; --bad-bg:#421815; --warn-bg:#3a2a0a; --idle-bg:#242930;
  --complete:#2c8a60; --removed:#61748c; --unproven:#b98516; --duplicated:#e0812a; --overlapped:#b678ea; --lost:#f2564d;
  --hatch:#ffffff3d;
  --owner-0:#2f5f98; --owner-1:#94591a; --owner-2:#2c7443; --owner-3:#7d4186; --owner-4:#75681a; --owner-5:#1f6f74;
  --owner-6:#943f3f; --owner-7:#5b4c9e; --owner-8:#59616c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main, .verdict > div { max-width: 74rem; margin: 0 auto; padding: 0 1.25rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; }
a { color: inherit; }
.muted, caption, figcaption { color: var(--muted); font-size: .9rem; }
.verdict { padding: 1.75rem 0 1.5rem; border-bottom: 4px solid currentColor; }
.verdict > div { display: grid; grid-template-columns: auto 1fr; gap: 0 1.25rem; align-items: center; }
.verdict svg { width: 4.5rem; height: 4.5rem; }
.verdict h1 { font-size: clamp(2rem, 6vw, 3.25rem); line-height: 1.1; margin: 0; overflow-wrap: anywhere; }
.verdict p { grid-column: 1 / -1; margin: .9rem 0 0; color: var(--ink); font-size: 1.15rem; max-width: 60rem; }
.good { background: var(--good-bg); color: var(--good); } .bad { background: var(--bad-bg); color: var(--bad); }
.warn { background: var(--warn-bg); color: var(--warn); } .idle { background: var(--idle-bg); color: var(--idle); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1.5rem 0 0; }
.numbers div { background: var(--raised); border-radius: .5rem; padding: .75rem .7rem;
  border-left: .3rem solid transparent; }
.numbers dt { color: var(--muted); font-size: .9rem; }
.numbers dd { margin: 0; }
.numbers .number { font-size: 1.45rem; font-weight: 650; line-height: 1.35; letter-spacing: -.02em; }
.numbers .long { font-size: 1rem; line-height: 1.96; }
.numbers dd.muted { font-size: .82rem; line-height: 1.35; }
.numbers .is-bad { border-left-color: var(--bad); } .numbers .is-bad .number { color: var(--bad); }
.numbers .is-warn { border-left-color: var(--warn); } .numbers .is-warn .number { color: var(--warn); }
.findings { list-style: none; padding: 0; margin: .75rem 0 0; }
.findings li { background: var(--raised); border-radius: .5rem; padding: .75rem 1rem; margin: 0 0 .6rem;
  overflow-wrap: anywhere; }
.findings p { margin: .35rem 0; }
.findings dl { display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; margin: 0; font-size: .9rem; }
.findings dl div { display: flex; gap: .4rem; } .findings dt { color: var(--muted); white-space: nowrap; }
.findings dd { margin: 0; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; padding: .4rem 0; font-weight: 600; }
.tag { display: inline-block; padding: .05rem .55rem; border-radius: 1rem; font-size: .85rem; font-weight: 650;
  border: 1px solid currentColor; white-space: nowrap; }
figure { margin: 0; } figcaption { margin-bottom: .5rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure .narrow { display: none; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: 0 0 .5rem;
  font-size: .9rem; }
.key svg { display: inline-block; width: 1.1rem; height: 1.1rem; vertical-align: -.2rem; margin-right: .35rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
.scroll:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .6rem .5rem; }
th, td { padding: .4rem .5rem; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
th.left, td.left { text-align: left; }
tbody th, tfoot th { font-weight: 600; text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 9rem; max-width: 22rem; }
td.owners { white-space: normal; min-width: 7.5rem; }
td.bad, td.warn { font-weight: 650; } td.zero { color: var(--muted); }
tfoot td, tfoot th { background: var(--raised); }
.words { display: grid; grid-template-columns: minmax(7rem, auto) 1fr; gap: .35rem 1.25rem; margin: .5rem 0; }
.words dt { font-weight: 600; } .words dd { margin: 0; overflow-wrap: anywhere; }
footer { margin: 3rem 0 2rem; padding-top: 1rem; border-top: 1px solid var(--line); }
@media (max-width: 46rem) {
  figure .wide { display: none; } figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure .narrow { display: block; }
  main, .verdict > div { padding: 0 .9rem; }
  .verdict svg { width: 3rem; height: 3rem; } .verdict p { font-size: 1.05rem; }
  .numbers { grid-template-columns: repeat(2, 1fr); }
  .numbers .number { font-size: 1.3rem; } .numbers .long { font-size: 1.05rem; }
  .words { grid-template-columns: 1fr; } .words dd { margin-bottom: .5rem; }
  tbody th, tfoot th { min-width: 9rem; max-width: 11rem; }
}
@media print { .findings li, figure, tr { break-inside: avoid; } .scroll { overflow: visible; } }
"""
