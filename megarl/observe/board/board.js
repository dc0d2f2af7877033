// The page: the list of runs, and the parts of the run that is looked into. The report has one run and asks nobody.

const BOARD = JSON.parse(document.getElementById('data').textContent);
const KEY = new URLSearchParams(location.search).get('key') || '';
const POLL_MS = 2500;
const view = {runs: BOARD.runs, chosen: new Set(), main: null, curves: {}, window: 1, axis: 'steps', equal: false, others: false};
const parts = {};

// Asks the dashboard for `name`; the report answers from what it holds.
async function ask(name, query) {
  if (!BOARD.live) return BOARD.answers[name];
  const response = await fetch('api/' + name + '?' + new URLSearchParams(query), {headers: {'X-Megarl-Key': KEY}});
  if (!response.ok) throw new Error((await response.text()).slice(0, 200));
  return response.json();
}

function banner(text) { parts.banner.hidden = !text; replace(parts.banner, text || ''); }

// -- theme ---------------------------------------------------------------------------------------------------------

function setTheme(theme) {
  const dark = theme === 'dark' || (theme === 'auto' && matchMedia('(prefers-color-scheme: dark)').matches);
  document.documentElement.dataset.theme = dark ? 'dark' : 'light';
}

// -- runs ----------------------------------------------------------------------------------------------------------

function colorOfRun(id) { return COLORS[[...view.chosen].indexOf(id) % COLORS.length]; }
function counted(count, word) { return `${count} ${word}${count === 1 ? '' : 's'}`; }
function nameOfRun(id) { return id === '.' ? view.runs[0].name : id; }
function ago(age) { return age === null || age === undefined ? '' : age < 90 ? Math.round(age) + ' s ago' : age < 5400 ? Math.round(age / 60) + ' min ago' : age < 172800 ? Math.round(age / 3600) + ' h ago' : Math.round(age / 86400) + ' days ago'; }
const FIGURES = {'eval/accuracy': ['accuracy', '%'], 'rollout/reward': ['reward', ''], 'train/loss': ['loss', '']};

function drawRuns() {
  if (!BOARD.live) return;
  const wanted = parts.filter.value.toLowerCase();
  replace(parts.runs, view.runs.filter(run => run.id.toLowerCase().includes(wanted)).map(run => {
    const box = el('input', {type: 'checkbox', 'aria-label': 'compare ' + plain(run.id), onchange: () => choose(run.id, box.checked)});
    box.checked = view.chosen.has(run.id);
    const figures = Object.entries(run.figures).filter(([name]) => FIGURES[name]).map(([name, value]) => FIGURES[name][0] + ' ' + shown(value, FIGURES[name][1]));
    return el('div', {class: run.id === view.main ? 'run main' : 'run'}, el('label', {}, box, el('span', {class: 'swatch', color: view.chosen.has(run.id) ? colorOfRun(run.id) : 'var(--line)'})),
      el('button', {onclick: () => open(run.id)}, nameOfRun(run.id)), el('span', {class: 'state-' + run.state}, run.state), el('span', {class: 'soft'}, ['step ' + run.step, ...figures, ago(run.age_s)].filter(Boolean).join(' · ')));
  }));
  replace(parts.runCount, view.runs.length + (view.runs.length === 1 ? ' run' : ' runs') + ', ' + view.chosen.size + ' compared');
}

async function choose(id, on) {
  if (on) view.chosen.add(id); else view.chosen.delete(id);
  drawRuns();
  await loadCurves();
}

async function open(id) {
  view.main = id;
  view.chosen.add(id);
  drawRuns();
  await loadRun(true);
  await loadCurves(true);
}

// -- curves --------------------------------------------------------------------------------------------------------

async function loadCurves(force) {
  let changed = Boolean(force);
  for (const id of view.chosen) {
    const have = view.curves[id], answer = await ask('curves', {run: id, have: have ? have.stamp : ''});
    if (answer.series) { view.curves[id] = answer; changed = true; }
  }
  if (changed || view.drawn !== [...view.chosen].join('\n')) drawCurves();
}

function linesOf(names) {
  const lines = [], several = view.chosen.size > 1, held = Object.keys(names).filter(name => [...view.chosen].some(id => view.curves[id] && view.curves[id].series[name]));
  [...view.chosen].forEach(id => {
    const data = view.curves[id];
    if (!data) return;
    Object.entries(names).forEach(([name, words], n) => {
      const points = data.series[name];
      if (!points || !points[0].length) return;
      lines.push({name: !several ? words : held.length > 1 ? nameOfRun(id) + ' · ' + words : nameOfRun(id), color: several ? colorOfRun(id) : COLORS[n % COLORS.length], dash: several ? DASHES[n % DASHES.length] : '', xs: view.axis === 'hours' ? hoursOf(data, points[0]) : points[0], ys: points[1]});
    });
  });
  return lines;
}

function hoursOf(data, steps) {
  const [known, hours] = data.hours;
  if (!known.length) return steps.map(() => 0);
  return steps.map(step => {
    let low = 0, high = known.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (known[middle] <= step) low = middle; else high = middle; }
    const span = known[high] - known[low];
    return span ? hours[low] + Math.min(1, Math.max(0, (step - known[low]) / span)) * (hours[high] - hours[low]) : hours[low];
  });
}

function drawCurves() {
  view.drawn = [...view.chosen].join('\n');
  const charts = BOARD.charts.map(([title, unit, names]) => ({title, unit, lines: linesOf(names)}));
  if (view.others) {
    const charted = new Set(BOARD.charts.flatMap(([, , names]) => Object.keys(names))), others = new Set([...view.chosen].flatMap(id => Object.keys((view.curves[id] || {series: {}}).series)));
    [...others].filter(name => !charted.has(name)).sort().forEach(name => charts.push({title: name, unit: '', lines: linesOf({[name]: name.split('/').pop()})}));
  }
  const present = charts.filter(one => one.lines.length), ranges = view.equal ? equalRanges(present) : {};
  replace(parts.charts, present.map(one => chart(one.lines, {title: one.title, unit: one.unit, xName: view.axis, window: view.window, range: ranges[one.unit]})));
  if (!present.length) replace(parts.charts, el('p', {class: 'soft'}, view.chosen.size ? 'No metrics yet.' : 'Choose a run.'));
  const main = view.curves[view.main], stages = main ? Object.entries(main.stages).filter(([, points]) => points[0].length) : [];
  parts.stages.hidden = !stages.length;
  replace(parts.stages, stages.length ? chart(stack(stages.map(([name, points]) => ({name, xs: points[0], ys: points[1]}))), {title: "A step's seconds", unit: 'seconds, stacked', xName: 'steps', stacked: true}) : null);
  const damaged = [...view.chosen].filter(id => view.curves[id] && view.curves[id].damaged);
  replace(parts.damaged, damaged.map(id => `${nameOfRun(id)}: ${view.curves[id].damaged} damaged lines of metrics are left out. `));
}

// One range for all charts of a unit: percent from 0 to 100.
function equalRanges(charts) {
  const ranges = {};
  for (const one of charts) {
    const [low, high] = extent(one.lines, 'ys'), known = ranges[one.unit] || [0, 0];
    ranges[one.unit] = one.unit === '%' ? [0, 1] : [Math.min(known[0], low), Math.max(known[1], high * 1.05)];
  }
  return ranges;
}

// -- one run -------------------------------------------------------------------------------------------------------

async function loadRun(fresh) {
  const id = view.main, run = await ask('run', {run: id});
  if (id !== view.main) return;
  view.run = run;
  replace(parts.title, BOARD.live ? nameOfRun(id) : BOARD.title);
  replace(parts.facts, run.facts.map(([name, value]) => el('div', {class: 'fact'}, el('b', {}, value), name)));
  replace(parts.timings, run.timings.length ? table([{name: 'stage'}, {name: 'median', number: true}, {name: 'longest', number: true}, {name: 'in all', number: true}], run.timings.map(([name, ...rest]) => [name, ...rest.map(seconds)])) : el('p', {class: 'soft'}, 'No step has ended yet.'));
  drawAccounts(run.accounts);
  drawPlan(run.plan);
  replace(parts.config, run.config ? el('details', {}, el('summary', {}, 'config.yaml'), el('pre', {}, run.config)) : el('p', {class: 'soft'}, 'The run has no config.yaml.'));
  replace(parts.profiles, run.profiles.length ? ['Traces of torch.profiler in profiles/: ', run.profiles.join(', '), '. ui.perfetto.dev opens them.'] : []);
  const sources = run.sources.join('\n');
  if (fresh || sources !== view.sources) {
    view.sources = sources;
    replace(parts.samples, run.sources.length ? samplesPart(run.sources, findSamples) : el('p', {class: 'soft'}, 'The run has no samples yet.'));
  }
  if (fresh || parts.follow.checked) await loadTimeline(run.timeline_steps);
  await loadState();
}

async function findSamples(source, query) {
  if (!BOARD.live) return filtered(BOARD.answers.samples[source] || [], query, BOARD.answers.sample_counts[source]);
  try { return await ask('samples', {run: view.main, source, ...query}); } catch (error) { banner(error.message); return null; }
}

function drawAccounts(accounts) {
  if (accounts.trained === undefined) { replace(parts.accounts, el('p', {class: 'soft'}, 'The run samples no prompts.')); return; }
  replace(parts.accounts, el('p', {}, accounts.trained.toLocaleString('en-US') + ' prompts trained on.'), accounts.reasons.length ? table([{name: 'reason', text: true}, {name: 'count', number: true}], accounts.reasons) : el('p', {class: 'soft'}, 'Nothing was left out.'));
}

async function loadState() {
  let answer;
  try { answer = await ask('state', {run: view.main}); } catch (error) { replace(parts.state, el('p', {class: 'wrong'}, error.message)); return; }
  replace(parts.state, answer.states.length ? table([{name: 'what'}, {name: 'state', text: true}, {name: 'last line of its log', text: true}], answer.states, 'folds') : el('p', {class: 'soft'}, 'The run has no logs.'));
}

// -- timeline ------------------------------------------------------------------------------------------------------

async function loadTimeline(steps) {
  if (!steps.length) { replace(parts.timeline, el('p', {class: 'soft'}, 'The run has recorded no timeline.')); return; }
  const count = Math.max(1, Math.min(50, Number(parts.count.value) || 1)), newest = steps[steps.length - 1];
  if (parts.follow.checked) parts.last.value = newest;
  const last = Math.min(newest, Math.max(0, Number(parts.last.value) || 0)), first = Math.max(0, last - count + 1);
  view.timeline = BOARD.live ? await ask('timeline', {run: view.main, first, last}) : BOARD.answers.timeline;
  drawTimeline();
}

function drawTimeline() {
  if (!view.timeline) return;
  replace(parts.timeline, timelineView(view.timeline, Number(parts.zoom.value)));
  replace(parts.range, view.timeline.first === view.timeline.last ? 'step ' + view.timeline.last : `steps ${view.timeline.first} to ${view.timeline.last}`);
  parts.trace.setAttribute('href', BOARD.live ? 'api/trace?' + new URLSearchParams({run: view.main, key: KEY}) : 'trace.json');
}

// -- sync plan -----------------------------------------------------------------------------------------------------

function drawPlan(plan) {
  if (!plan || !Array.isArray(plan.sent)) { replace(parts.plan, el('p', {class: 'soft'}, 'No plan: the run has pushed no weights yet, or sends whole tensors.')); return; }
  const sum = list => list.reduce((a, b) => a + b, 0), ratio = Math.max(...plan.received.map((n, i) => n / (plan.held[i] || 1)));
  const rows = [['from, to', `${counted(plan.sent.length, 'trainer rank')}, ${counted(plan.received.length, 'rank')} of ${counted(new Set(plan.server_of_rank).size, 'server')}`], ['servers', plan.servers.join(', ')], ['transport', plan.transports || '–'], ['moved by a full sync', bytes(sum(plan.received)) + (plan.relayed ? `, of which ${bytes(plan.relayed)} through other server ranks` : '')],
    ['received over held', ratio.toFixed(2) + ' (1 is the least)'], ['tensors, messages', `${plan.tensors}, ${plan.messages} in ${plan.buckets} buckets of ${bytes(plan.bucket_bytes)}`], ['plan', String(plan.hash).slice(0, 16) + ', first used for version ' + plan.version]];
  replace(parts.plan, table([{name: ''}, {name: '', text: true}], rows), el('h3', {class: 'gap'}, 'Bytes from each trainer rank to each server rank'), planPicture(plan),
    plan.all_pairs > plan.pairs.length ? el('p', {class: 'soft'}, `the heaviest ${plan.pairs.length} of ${plan.all_pairs} pairs`) : null);
}

function planPicture(plan) {
  const most = Math.max(1, ...plan.pairs.map(pair => pair[2])), side = Math.max(14, Math.min(64, Math.floor(560 / Math.max(plan.received.length, 1)))), left = 96, top = 22;
  const width = left + Math.max(side * plan.received.length, 150) + 4, height = top + side * plan.sent.length + 4, picture = svg('svg', {width, height, viewBox: `0 0 ${width} ${height}`});
  picture.append(svg('text', {x: left, y: 14}, 'server ranks'));
  plan.sent.forEach((_, n) => { if (side > 10 && (n % Math.ceil(14 / side) === 0)) picture.append(svg('text', {x: left - 6, y: top + n * side + side / 2 + 4, 'text-anchor': 'end'}, 'trainer ' + n)); });
  for (const [from, to, size] of plan.pairs) {
    picture.append(svg('rect', {x: left + to * side, y: top + from * side, width: side - 1, height: side - 1, rx: 2, fill: COLORS[0], 'fill-opacity': 0.2 + 0.8 * size / most}, svg('title', {}, `trainer rank ${from} to server rank ${to}: ${bytes(size)}`)));
    if (side >= 52) picture.append(label(bytes(size), left + to * side + 4, top + from * side + side / 2 + 4));
  }
  return el('div', {class: 'scroll'}, picture);
}

// -- the page ------------------------------------------------------------------------------------------------------

function build() {
  const part = (id, title, ...inside) => el('section', {}, el('h2', {id}, title), ...inside);
  const theme = el('select', {class: 'theme', 'aria-label': 'theme', onchange: () => setTheme(theme.value)}, ['auto', 'light', 'dark'].map(name => el('option', {value: name}, name === 'auto' ? 'light or dark' : name)));
  const smooth = el('input', {type: 'range', min: 1, max: 100, value: 1, id: 'smooth', oninput: () => { view.window = Number(smooth.value); replace(parts.window, view.window > 1 ? `mean of ${view.window} points` : 'off'); drawCurves(); }});
  const toggle = (words, change) => { const box = el('input', {type: 'checkbox', onchange: () => { change(box.checked); drawCurves(); }}); return el('label', {}, box, words); };
  const axis = el('select', {'aria-label': 'horizontal axis', onchange: () => { view.axis = axis.value; drawCurves(); }}, el('option', {value: 'steps'}, 'over steps'), el('option', {value: 'hours'}, 'over hours'));
  const redo = () => { parts.follow.checked = false; loadTimeline(view.run.timeline_steps).catch(error => banner(error.message)); };
  Object.assign(parts, {
    banner: el('div', {class: 'banner', role: 'alert', hidden: true}), runs: el('div', {class: 'runs'}), runCount: el('span', {class: 'soft'}), filter: el('input', {type: 'search', placeholder: 'find a run', 'aria-label': 'find a run', oninput: drawRuns}),
    title: el('h1'), facts: el('div', {class: 'facts'}), charts: el('div', {class: 'charts', id: 'charts'}), stages: el('div'), damaged: el('p', {class: 'wrong'}), window: el('span', {class: 'soft'}, 'off'), timings: el('div'), timeline: el('div'), samples: el('div'),
    state: el('div'), plan: el('div'), accounts: el('div'), config: el('div'), profiles: el('p', {class: 'soft'}), range: el('span', {class: 'soft'}), trace: el('a', {href: 'trace.json', download: 'trace.json'}, 'trace.json for Perfetto'),
    follow: el('input', {type: 'checkbox', id: 'follow', onchange: () => loadTimeline(view.run.timeline_steps)}), last: el('input', {class: 'short', type: 'number', min: 0, id: 'laststep', onchange: redo}), count: el('input', {class: 'short', type: 'number', min: 1, max: 50, value: 1, id: 'stepcount', onchange: redo}),
    zoom: el('input', {type: 'range', min: 1, max: 30, value: 1, 'aria-label': 'zoom', oninput: drawTimeline})});
  parts.follow.checked = true;
  const sections = [['curves', 'Curves'], ['timings', 'Timings'], ['timeline', 'Timeline'], ['samples-part', 'Samples'], ['state', 'Ranks and servers'], ['plan', 'Sync plan'], ['prompts', 'Prompts'], ['config', 'Configuration']];
  const controls = BOARD.live ? [el('label', {}, parts.follow, 'newest step'), el('label', {}, 'to step', parts.last), el('label', {}, 'steps', parts.count)] : [];
  fill(document.getElementById('board'), {}, [
    el('div', {class: 'bar'}, el('b', {}, BOARD.live ? 'megarl runs' : 'megarl run'), el('span', {class: 'soft grow'}, BOARD.place), theme), parts.banner,
    BOARD.live ? el('div', {}, el('div', {class: 'bar'}, parts.filter, parts.runCount), parts.runs) : null,
    el('div', {class: 'bar'}, parts.title), BOARD.live ? null : el('p', {class: 'soft'}, BOARD.name), parts.facts,
    el('nav', {}, sections.map(([id, title]) => el('a', {href: '#' + id}, title))),
    part('curves', 'Curves', el('div', {class: 'bar'}, el('label', {}, 'smoothing', smooth, parts.window), axis, toggle('equal scales', on => { view.equal = on; }), toggle('all metrics', on => { view.others = on; })), parts.damaged, parts.charts),
    part('timings', 'Timings', el('div', {class: 'charts'}, parts.stages, parts.timings)),
    part('timeline', 'Timeline', el('div', {class: 'bar'}, controls, el('label', {}, 'zoom', parts.zoom), parts.range, parts.trace), parts.timeline, parts.profiles),
    part('samples-part', 'Samples', parts.samples), part('state', 'Ranks and servers', parts.state), part('plan', 'Sync plan', parts.plan), part('prompts', 'Prompts', parts.accounts), part('config', 'Configuration', parts.config)]);
  setTheme('auto');
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => setTheme(theme.value));
}

async function poll() {
  if (!document.hidden) {
    try {
      const before = JSON.stringify(view.runs.map(run => [run.id, run.step, run.state]));
      view.runs = (await ask('runs', {})).runs;
      drawRuns();
      if (view.main === null && view.runs.length) await open(view.runs[0].id);
      else if (view.main !== null && before !== JSON.stringify(view.runs.map(run => [run.id, run.step, run.state]))) { await loadRun(false); await loadCurves(); }
      else if (view.main !== null) await loadState();
      banner('');
    } catch (error) { banner('The dashboard does not answer (' + error.message + '). The page shows the last answers.'); }
  }
  setTimeout(poll, POLL_MS);
}

build();
if (BOARD.live) poll();
else open('.').catch(error => banner(error.message));
