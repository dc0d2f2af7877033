// Elements, numbers and charts. All text goes through textContent: nothing that a run wrote becomes markup.

const SVG = 'http://www.w3.org/2000/svg';
const COLORS = ['#2f80d0', '#d9822b', '#3b9b4b', '#a55fc4', '#d0473e', '#1f9aa8', '#8c6d5a', '#c9569c', '#7d8a1f', '#5d6fd8'];
const DASHES = ['', '6 4', '2 3', '9 3 2 3'];
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// Text in which characters that hide, or turn the reading direction, are shown by their number.
function plain(text) {
  return String(text).replace(/\r\n/g, '\n').replace(HIDDEN, c => '⟨U+' + c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0') + '⟩');
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'color') node.style.background = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const replace = (node, ...children) => { node.textContent = ''; return fill(node, {}, children); };

function shown(value, unit) {
  if (unit === '%') return (value * 100).toLocaleString('en-US', {maximumFractionDigits: Math.abs(value) < 0.01 ? 2 : 1}) + ' %';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(1).replace('e', ' e');
  if (size >= 1e4) return value.toLocaleString('en-US', {notation: 'compact', maximumSignificantDigits: 3});
  return value.toLocaleString('en-US', {maximumSignificantDigits: 4});
}
function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 1e-3) return (value * 1e6).toFixed(0) + ' µs';
  if (value < 1) return (value * 1e3).toFixed(value < 0.1 ? 1 : 0) + ' ms';
  return value < 120 ? value.toFixed(2) + ' s' : Math.floor(value / 60) + ' min ' + Math.round(value % 60) + ' s';
}
function bytes(value) {
  for (const [unit, scale] of [['TB', 1e12], ['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) if (value >= scale) return (value / scale).toFixed(1) + ' ' + unit;
  return value + ' B';
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count, whole) {
  const span = Math.max(high - low, 1e-12), rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map(f => f * power).find(s => s >= 0.7 * rough) || 10 * power;
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-6 && found.length < 40; n++) found.push(n * step || 0); // no -0
  return found;
}

// Trailing means over `window` points.
function smoothed(values, window) {
  if (window <= 1) return values;
  const means = [];
  let sum = 0;
  values.forEach((value, i) => {
    sum += value - (i >= window ? values[i - window] : 0);
    means.push(sum / Math.min(i + 1, window));
  });
  return means;
}

function extent(lines, x) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const value of line[x]) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

// A chart of `lines` {name, color, dash, xs, ys}. options: title, unit, xName, window, range [low, high], stacked.
function chart(lines, options) {
  const figure = el('figure', {class: 'chart'});
  const readout = el('div', {class: 'readout'});
  const place = el('div');
  const legend = el('div', {class: 'legend'}, lines.map(line => el('span', {}, swatch(line), line.name)));
  fill(figure, {}, [el('h3', {}, options.title, el('span', {class: 'soft'}, '  ' + (options.unit === '%' ? 'percent' : options.unit))), legend, place, readout]);
  let width = 0;
  const draw = () => {
    if (!place.clientWidth || place.clientWidth === width) return;
    width = place.clientWidth;
    replace(place, drawn(lines, options, width, readout));
  };
  new ResizeObserver(draw).observe(place);
  return figure;
}

function swatch(line) {
  if (line.area) return svg('svg', {width: 14, height: 14}, svg('rect', {width: 14, height: 14, rx: 3, fill: line.color}));
  return svg('svg', {width: 26, height: 10}, svg('line', {x1: 0, x2: 26, y1: 5, y2: 5, stroke: line.color, 'stroke-width': 3, 'stroke-dasharray': line.dash}));
}

function drawn(lines, options, width, readout) {
  const height = 230, left = 58, right = 10, top = 8, bottom = 36;
  const drawnLines = lines.map(line => ({...line, raw: line.ys, ys: line.area ? line.ys : smoothed(line.ys, options.window || 1)}));
  let [x0, x1] = extent(lines, 'xs');
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  let [y0, y1] = options.range || extent(lines, options.stacked ? 'top' : 'ys');
  if (options.stacked) y0 = 0;
  if (!options.range) {
    const pad = y1 > y0 ? (y1 - y0) * 0.06 : Math.abs(y1) * 0.1 || (options.unit === '%' ? 0.05 : 1);
    y1 = options.unit === '%' && y1 <= 1 ? Math.min(1, y1 + pad) : y1 + pad;
    if (!options.stacked) y0 = y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad;
  }
  if (y0 === y1) y1 += 1;
  const x = value => left + (value - x0) / (x1 - x0) * (width - left - right);
  const y = value => height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom);
  const picture = svg('svg', {class: 'plot', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': options.title});
  for (const value of ticks(y0, y1, 4)) {
    picture.append(svg('line', {class: 'grid', x1: left, x2: width - right, y1: y(value), y2: y(value)}));
    picture.append(svg('text', {x: left - 6, y: y(value) + 4, 'text-anchor': 'end'}, shown(value, options.unit)));
  }
  for (const value of ticks(x0, x1, Math.max(2, Math.floor((width - left) / 80)), options.xName === 'steps')) {
    picture.append(svg('text', {x: x(value), y: height - bottom + 16, 'text-anchor': 'middle'}, shown(value, '')));
  }
  picture.append(svg('line', {class: 'axis', x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
  picture.append(svg('text', {x: width - right, y: height - 4, 'text-anchor': 'end'}, options.xName === 'hours' ? 'hours' : 'training steps'));
  const points = (line, ys) => line.xs.map((value, i) => x(value).toFixed(1) + ',' + y(ys[i]).toFixed(1));
  for (const line of drawnLines) {
    if (line.area) {
      const floor = line.xs.map((value, i) => x(value).toFixed(1) + ',' + y(line.base[i]).toFixed(1)).reverse();
      picture.append(svg('polygon', {points: [...points(line, line.top), ...floor].join(' '), fill: line.color}));
      continue;
    }
    if (options.window > 1) picture.append(svg('polyline', {points: points(line, line.raw).join(' '), fill: 'none', stroke: line.color, 'stroke-opacity': 0.25}));
    picture.append(svg('polyline', {points: points(line, line.ys).join(' '), fill: 'none', stroke: line.color, 'stroke-width': 2, 'stroke-dasharray': line.dash, 'stroke-linejoin': 'round'}));
    if (line.xs.length < 40) line.xs.forEach((value, i) => picture.append(svg('circle', {cx: x(value), cy: y(line.ys[i]), r: 2.5, fill: line.color})));
  }
  const cursor = svg('line', {class: 'axis', y1: top, y2: height - bottom, 'stroke-dasharray': '3 3', visibility: 'hidden'});
  picture.append(cursor);
  picture.addEventListener('pointermove', event => {
    const box = picture.getBoundingClientRect(), at = x0 + (event.clientX - box.left - left) / (width - left - right) * (x1 - x0);
    const near = drawnLines.map(line => [line, nearest(line.xs, at)]).filter(([, i]) => i >= 0);
    if (!near.length) return;
    const closest = near.map(([line, i]) => line.xs[i]).reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
    cursor.setAttribute('x1', x(closest)); cursor.setAttribute('x2', x(closest)); cursor.setAttribute('visibility', 'visible');
    const parts = near.filter(([line, i]) => Math.abs(line.xs[i] - closest) < (x1 - x0) * 0.02 + 1e-9).map(([line, i]) => line.name + ' ' + shown(line.ys[i], options.unit));
    replace(readout, (options.xName === 'hours' ? shown(closest, '') + ' h: ' : 'step ' + shown(closest, '') + ': ') + parts.join(' · '));
  });
  picture.addEventListener('pointerleave', () => { cursor.setAttribute('visibility', 'hidden'); replace(readout); });
  return picture;
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle; else high = middle; }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

// Lines stacked on each other: [{name, xs, ys}] with equal xs.
function stack(parts) {
  let base = parts.length ? parts[0].xs.map(() => 0) : [];
  return parts.map(part => {
    const top = part.ys.map((value, i) => value + base[i]), line = {...part, color: colorOf(part.name), area: true, base, top};
    base = top;
    return line;
  });
}

// `name` is a class of the table; heads are {name, number, text}. Without names there is no row of heads.
function table(heads, rows, name) {
  const cell = (tag, value, n) => el(tag, {class: heads[n].number ? 'number' : heads[n].text ? 'text' : undefined}, value);
  const first = heads.some(head => head.name) ? el('thead', {}, el('tr', {}, heads.map((head, n) => cell('th', head.name, n)))) : null;
  return el('div', {class: 'wide'}, el('table', {class: name}, first,
    el('tbody', {}, rows.map(row => el('tr', {}, row.map((value, n) => cell('td', value, n)))))));
}

// Lanes of spans over time, and the servers' loads under their lanes. `zoom` widens the time axis.
function timelineView(data, zoom) {
  const spans = data.lanes.flatMap(lane => lane.spans), times = [...spans.flatMap(s => [s[1], s[2]]), ...Object.values(data.loads).flatMap(l => l.map(e => e[0]))];
  if (!times.length) return el('p', {class: 'soft'}, 'No span is recorded of these steps.');
  const steps = data.lanes.flatMap(lane => lane.spans.map(s => s[1]));
  const start = steps.length ? steps.reduce((a, b) => Math.min(a, b)) : times.reduce((a, b) => Math.min(a, b)), end = times.reduce((a, b) => Math.max(a, b));
  const readout = el('div', {class: 'readout'}, 'Touch or point at a span to read it.');
  const servers = new Set(Object.keys(data.loads));
  const groups = new Map();
  for (const lane of data.lanes) {
    const server = servers.has(lane.lane), name = server ? 'server ' + lane.lane : lane.process + (lane.lane ? ', ' + lane.lane : '');
    if (!groups.has(name)) groups.set(name, {name, rows: [], load: server ? data.loads[lane.lane] : null});
    groups.get(name).rows.push(lane);
  }
  for (const server of servers) if (!groups.has('server ' + server)) groups.set('server ' + server, {name: 'server ' + server, rows: [], load: data.loads[server]});
  const box = el('div', {class: 'lanes'}), scrolls = [];
  groups.set('', {name: 'seconds', rows: [], load: null, isAxis: true});
  for (const group of [...groups.values()].sort((a, b) => order(a) - order(b))) {
    const place = el('div', {class: 'scroll'});
    scrolls.push(place);
    const most = group.load ? group.load.reduce((a, e) => Math.max(a, e[1]), 0) : 0;
    fill(box, {}, [el('div', {class: 'lane-name'}, el('b', {}, group.name), group.load ? el('span', {class: 'soft'}, ` at most ${most} under way`) : null), place]);
    let width = 0;
    new ResizeObserver(() => {
      if (!place.clientWidth || width === place.clientWidth * zoom) return;
      width = place.clientWidth * zoom;
      replace(place, group.isAxis ? axisPicture(end - start, width) : lanePicture(group, start, end, width, most, readout));
    }).observe(place);
  }
  for (const one of scrolls) one.addEventListener('scroll', () => { for (const other of scrolls) if (other.scrollLeft !== one.scrollLeft) other.scrollLeft = one.scrollLeft; });
  return el('div', {}, readout, el('div', {class: 'wide'}, box), el('p', {class: 'soft'}, `${seconds(end - start)} in all` + (data.left_out ? `; the ${data.left_out} shortest spans are left out` : '')));
}

const order = group => group.isAxis ? 2 : group.load ? 1 : 0; // ranks, servers, the axis

function axisPicture(span, width) {
  const picture = svg('svg', {width, height: 20, viewBox: `0 0 ${width} 20`}), x = value => 4 + value / (span || 1) * (width - 8);
  for (const value of ticks(0, span, Math.max(2, Math.floor(width / 110)))) {
    picture.append(svg('line', {class: 'axis', x1: x(value), x2: x(value), y1: 0, y2: 5}));
    if (x(value) < width - 60) picture.append(svg('text', {x: x(value) + 3, y: 15}, seconds(value)));
  }
  return picture;
}

// Depth of each span among the spans of its row that hold it.
function depths(spans) {
  const open = [];
  return spans.map(span => {
    while (open.length && open[open.length - 1] <= span[1]) open.pop();
    open.push(span[2]);
    return open.length - 1;
  });
}

function lanePicture(group, start, end, width, most, readout) {
  const row = 20, x = time => 4 + (time - start) / (end - start || 1) * (width - 8);
  const deep = group.rows.map(lane => depths(lane.spans)), heights = deep.map(d => (d.reduce((a, b) => Math.max(a, b), 0) + 1) * row);
  const loadHeight = group.load ? 48 : 0, height = heights.reduce((a, b) => a + b, 0) + loadHeight + 4;
  const picture = svg('svg', {width, height, viewBox: `0 0 ${width} ${height}`});
  let top = 2;
  group.rows.forEach((lane, n) => {
    lane.spans.forEach((span, i) => {
      const x1 = x(span[1]), wide = Math.max(1.5, x(span[2]) - x1), y = top + deep[n][i] * row;
      const words = `${span[0]}: ${seconds(span[2] - span[1])}, from ${seconds(Math.max(0, span[1] - start))}`;
      const tell = () => replace(readout, words);
      picture.append(svg('rect', {x: x1, y, width: wide, height: row - 2, rx: 2, fill: colorOf(span[0]), stroke: 'var(--back)', 'stroke-width': 0.5, onpointerenter: tell, onpointerdown: tell}, svg('title', {}, words)));
      if (wide > span[0].length * 6.2 + 8) picture.append(label(span[0], x1 + 4, y + 13));
    });
    top += heights[n];
  });
  if (group.load) {
    const y = running => height - 4 - running / (most || 1) * (loadHeight - 8), points = [];
    let before = 0;
    for (const [when, running] of group.load) { points.push([x(Math.max(when, start)), y(before)], [x(Math.max(when, start)), y(running)]); before = running; }
    if (points.length) {
      points.unshift([points[0][0], y(0)]); points.push([x(end), y(before)], [x(end), y(0)]);
      picture.append(svg('polygon', {points: points.map(p => p[0].toFixed(1) + ',' + p[1].toFixed(1)).join(' '), fill: COLORS[0], 'fill-opacity': 0.45}));
    }
  }
  return picture;
}

function label(text, x, y) {
  const node = svg('text', {x, y, 'pointer-events': 'none'}, text);
  node.style.fill = '#fff';
  return node;
}
// Stages that most runs have get colours that differ; others get one by their name.
const SPAN_COLORS = ['#2b6cb0', '#b7601a', '#2f7d3d', '#8a4aa8', '#b03a32', '#197f8b', '#75594a', '#a8437f', '#646f17', '#4a59b8', '#5b6b7a'];
const STAGES = ['rollout', 'update', 'weights', 'evaluate', 'paused', 'logprobs', 'forward', 'optimizer', 'forward and backward', 'checkpoint', 'sync'];
function colorOf(name) {
  const stage = name.split(' for ')[0].split('/')[0], known = STAGES.indexOf(stage);
  let hash = 7;
  for (const letter of stage) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  return SPAN_COLORS[(known >= 0 ? known : hash) % SPAN_COLORS.length];
}
