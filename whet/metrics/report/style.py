"""The report's style sheet and its few lines of script. Both stand in the page; the page's policy admits only them."""

from whet.metrics.catalog import PHASES

_LIGHT = """
--paper:#faf9f7;--card:#fff;--ink:#1c1e21;--soft:#666b73;--line:#e5e3de;--grid:#efede8;--c1:#2f6fd0;--c2:#17936d;
--good:#17795a;--bad:#c23b3b;--good-bg:#e2f3ec;--bad-bg:#fae5e3;--warn:#96620a;--warn-bg:#fbf0d9;
--u1:#fdf1de;--u2:#fbdcae;--u3:#f7bd6c;--u4:#f09a2a;--d1:#e8f0fb;--d2:#c9def8;--d3:#94bff2;--d4:#5a9be8;--tip:#1c1e21;--tipink:#fff;
"""
_DARK = """
--paper:#131519;--card:#1a1d22;--ink:#e7e8ea;--soft:#969ca6;--line:#2b2f36;--grid:#24282e;--c1:#6ba6f7;--c2:#4fc3a1;
--good:#67d3b1;--bad:#f0857f;--good-bg:#173229;--bad-bg:#3a2020;--warn:#e8b04b;--warn-bg:#352a14;
--u1:#33291a;--u2:#553f17;--u3:#875b10;--u4:#bd760a;--d1:#1b2737;--d2:#1d3b5f;--d3:#1b568f;--d4:#1a72c2;--tip:#e7e8ea;--tipink:#131519;
"""
_PHASES = {
    dark: "".join(f"--p-{name}:{colours[0 if dark else 1]};" for name, colours in PHASES.items())
    for dark in (True, False)
}

STYLE = (
    f":root{{color-scheme:light;{_LIGHT}{_PHASES[False]}}}"
    f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{_DARK}{_PHASES[True]}}}}}"
    f":root[data-theme=dark]{{color-scheme:dark;{_DARK}{_PHASES[True]}}}"
    + "".join(f".p-{name}{{fill:var(--p-{name});background:var(--p-{name})}}" for name in PHASES)
    + "".join(f".{side}{n}{{background:var(--{side}{n})}}" for side in "ud" for n in range(1, 5))
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 ui-sans-serif,system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;-webkit-font-smoothing:antialiased}
main{max-width:1180px;margin:0 auto;padding:40px 28px 80px}
header{display:flex;align-items:flex-start;gap:20px;justify-content:space-between}
.mark{display:inline-block;font-weight:650;font-size:12px;letter-spacing:.08em;color:var(--c2);margin-bottom:6px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;font-weight:650;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.01em;font-weight:620;margin:52px 0 16px}
h3{font-size:14px;font-weight:600;margin:0;display:flex;justify-content:space-between;gap:12px}
h3 span{font-weight:450;color:var(--soft)}
h3 .hot{color:var(--bad);font-weight:600}
.sub{color:var(--soft);margin:6px 0 0}.note{font-size:13px;margin:-10px 0 14px}
button{font:inherit;font-size:13px;color:var(--soft);background:none;border:1px solid var(--line);border-radius:8px;
padding:5px 12px;cursor:pointer}
button:hover{color:var(--ink)}
.hero{display:grid;grid-template-columns:minmax(0,1.25fr) minmax(0,1fr);gap:16px;margin-top:28px}
.box{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:20px 22px;min-width:0}
.label{font-size:13px;color:var(--soft);margin:0 0 4px}
.turn{display:flex;align-items:baseline;gap:16px;flex-wrap:wrap}
.turn .from{font-size:30px;color:var(--soft);letter-spacing:-.02em}
.turn .arrow{font-size:24px;color:var(--soft)}
.turn .to{font-size:52px;font-weight:650;letter-spacing:-.035em;line-height:1.1}
.up{color:var(--good)}.down{color:var(--bad)}
table{border-collapse:collapse;width:100%;font-size:14px;margin-top:14px}
th{font-weight:500;color:var(--soft);text-align:left;font-size:13px}
th,td{padding:7px 14px 7px 0;border-top:1px solid var(--line);overflow-wrap:anywhere}
tr:first-child th{border-top:0}
td.n,th.n{text-align:right;padding-right:0;padding-left:14px;white-space:nowrap}
.facts-grid{display:grid;grid-template-columns:auto 1fr;gap:7px 22px;margin:0;font-size:14px}
.facts-grid dt{color:var(--soft)}.facts-grid dd{margin:0;overflow-wrap:anywhere;text-align:right;font-weight:550}
.warnings{margin:16px 0 0;padding:14px 22px;background:var(--warn-bg);border-radius:14px;font-size:14px}
.warnings b{color:var(--warn)}.warnings ul{margin:6px 0 0;padding-left:18px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:16px}
.charts .box{padding:16px 16px 8px}.charts .box.big{grid-column:span 1}
.chart{display:block;width:100%;height:auto;margin-top:8px;overflow:visible}
.grid{stroke:var(--grid)}.tick{fill:var(--soft);font-size:13px}.wide .tick{font-size:12px}
.limit{stroke:var(--bad);stroke-dasharray:3 4;opacity:.7}
.line,.raw{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.raw{stroke-width:1;opacity:.35}
.line.c1,.raw.c1{stroke:var(--c1)}.line.c2,.raw.c2{stroke:var(--c2)}
.band.c1,circle.c1{fill:var(--c1)}.band.c2,circle.c2{fill:var(--c2)}.band{opacity:.16}
.c1{--dot:var(--c1)}.c2{--dot:var(--c2)}
.broken{stroke:var(--bad);stroke-width:1.8;fill:none}.cross{stroke:var(--soft);opacity:0}.chart:hover .cross{opacity:.5}
.keys{display:flex;flex-wrap:wrap;gap:6px 20px;font-size:13px;color:var(--soft);margin-top:8px}
.keys b{color:var(--ink);font-weight:550}
.keys i,.tip i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
.keys .c1,.keys .c2,.tip .c1,.tip .c2{background:var(--dot)}
.controls{display:flex;flex-wrap:wrap;gap:10px 20px;align-items:center;font-size:13px;color:var(--soft);
margin-bottom:14px}
select{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:4px 8px}
.legend{display:inline-flex;align-items:center;gap:2px}.legend i{width:14px;height:14px;border-radius:3px}
.legend i:first-of-type{margin-left:7px}.legend i:last-of-type{margin-right:7px}
.legend i:not([class]){border:1px solid var(--line)}
.count{margin-left:auto}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;margin-bottom:8px}
.card summary{display:flex;align-items:center;gap:12px;padding:11px 18px;cursor:pointer;list-style:none;font-size:14px}
.card summary::-webkit-details-marker{display:none}
.card summary:hover{background:var(--grid);border-radius:12px}
.at{min-width:44px;color:var(--soft);font-size:13px}.at::before{content:"step ";font-size:11px;opacity:.8}
.task{font-weight:550;overflow-wrap:anywhere}.task small{color:var(--soft);font-weight:400}
.facts{margin-left:auto;color:var(--soft);font-size:13px;text-align:right}.facts b{color:var(--ink);font-weight:550}
.chip{font-size:12px;font-weight:550;border-radius:99px;padding:1px 10px;background:var(--warn-bg);color:var(--warn)}
.chip.correct{background:var(--good-bg);color:var(--good)}.chip.wrong{background:var(--bad-bg);color:var(--bad)}
.prompt,.answer{font:13px/1.7 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere;padding:12px 18px;border-top:1px solid var(--line)}
.prompt{color:var(--soft);max-height:260px;overflow:auto}.answer{max-height:640px;overflow:auto}
.answer i{font-style:normal;border-radius:3px}.answer i:hover{outline:1.5px solid var(--ink)}
.scores,.error{margin:0;padding:10px 18px;border-top:1px solid var(--line);font-size:13px;color:var(--soft)}
.error{color:var(--bad);white-space:pre-wrap;overflow-wrap:anywhere}
.none{color:var(--soft);font-size:13px;font-family:inherit}
.tip{position:fixed;z-index:9;pointer-events:none;background:var(--tip);color:var(--tipink);border-radius:9px;
padding:8px 12px;font-size:12.5px;line-height:1.5;max-width:340px;white-space:pre-line;
overflow-wrap:anywhere;display:none}
pre{font:12.5px/1.6 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow:auto;margin:0}
details.recipe summary{cursor:pointer;color:var(--soft);font-size:14px}details.recipe pre{margin-top:14px}
footer{margin-top:56px;color:var(--soft);font-size:13px}
@media(max-width:820px){.hero{grid-template-columns:1fr}.facts{display:none}main{padding:24px 16px}}
@media print{button,.controls{display:none}}
"""
)

# Reads its data from attributes and writes text nodes only: nothing of the page can become markup again.
SCRIPT = """
"use strict";
const tip=document.createElement("div");tip.className="tip";document.body.append(tip);
function place(e){tip.style.display="block";const r=tip.getBoundingClientRect();
tip.style.left=Math.max(8,Math.min(e.clientX+14,innerWidth-r.width-8))+"px";
tip.style.top=(e.clientY+18+r.height>innerHeight?e.clientY-r.height-12:e.clientY+18)+"px"}
function hide(){tip.style.display="none"}
for(const svg of document.querySelectorAll("svg.chart")){
const d=svg.dataset,w=svg.viewBox.baseVal.width,low=+d.low,high=+d.high,left=+d.left,inner=w-left-d.right;
const series=[...svg.querySelectorAll("desc")].map(s=>({name:s.dataset.name,colour:s.dataset.colour,
x:s.dataset.x.split(",").map(Number),y:s.dataset.y.split("|")}));
svg.addEventListener("pointermove",e=>{const r=svg.getBoundingClientRect();
const at=low+((e.clientX-r.left)*w/r.width-left)/inner*(high-low);
const all=series.flatMap(s=>s.x);const step=all.reduce((a,b)=>Math.abs(b-at)<Math.abs(a-at)?b:a,all[0]);
const px=left+inner*(high>low?(step-low)/(high-low):.5);
const c=svg.querySelector(".cross");c.setAttribute("x1",px);c.setAttribute("x2",px);
tip.textContent="step "+step;
for(const s of series){const i=s.x.indexOf(step);if(i<0)continue;
const row=document.createElement("div"),k=document.createElement("i");
k.className=s.colour;row.append(k,s.name+" "+s.y[i]);tip.append(row)}
place(e)});svg.addEventListener("pointerleave",hide)}
const cards=document.getElementById("cards");
if(cards){const probability=v=>v+"  ("+(100*Math.exp(+v)).toPrecision(3)+"%)";
cards.addEventListener("pointermove",e=>{const t=e.target.dataset&&e.target.dataset.t;if(!t){hide();return}
const[id,a,b]=t.split("|");tip.textContent="token "+id+"  "+JSON.stringify(e.target.textContent)+
(a?"\\nsampler "+probability(a):"")+(b?"\\nlearner "+probability(b):"")+
(a&&b?"\\ndifference "+(b-a).toFixed(4):"");place(e)});
cards.addEventListener("pointerleave",hide);
const all=[...cards.children],pick=id=>document.getElementById(id);
const update=()=>{const step=pick("by-step").value,kind=pick("by-kind").value,order=pick("by-order").value;
const rank=c=>c.dataset[order]===undefined?-Infinity:+c.dataset[order];
const sorted=order==="order"?all:[...all].sort((a,b)=>rank(b)-rank(a));let n=0;
for(const c of sorted){const on=(!step||c.dataset.step===step)&&(!kind||c.dataset.kind.split(" ").includes(kind));
c.hidden=!on;n+=on;cards.append(c)}pick("count").textContent=n+" rollouts"};
for(const id of["by-step","by-kind","by-order"])pick(id).addEventListener("change",update)}
document.getElementById("theme").addEventListener("click",()=>{const root=document.documentElement;
const dark=root.dataset.theme?root.dataset.theme==="dark":matchMedia("(prefers-color-scheme:dark)").matches;
root.dataset.theme=dark?"light":"dark"});
"""
