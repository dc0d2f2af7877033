// Samples with their filter, and the conversation of each: who said it, what the model wrote, which tools it called.

const ROLE = /<\|im_start\|>(\w+)\n?|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*|<start_of_turn>(\w+)\n?|<\|(user|assistant|system|tool|observation)\|>\n?/g;
const TURN_END = /(\s*(<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|endoftext\|>|<\/s>|<\|end_of_text\|>))+\s*$/;
const PARTS = /<(tool_call|tool_response|think)>([\s\S]*?)(?:<\/\1>|$)/g;

// Turns `[sampled, text, characters left out]` as pieces {who, text, sampled, leftOut}, split at the template's roles.
function piecesOf(turns) {
  const pieces = [];
  for (const [sampled, text, leftOut] of turns) {
    if (sampled) { pieces.push({who: 'model', text: text.replace(TURN_END, ''), sampled, leftOut}); continue; }
    let who = pieces.length ? '' : 'prompt', from = 0;
    const add = until => {
      const part = text.slice(from, until).replace(TURN_END, '');
      if (part.trim()) pieces.push({who: who || 'given', text: part, sampled, leftOut: 0});
    };
    for (const found of text.matchAll(ROLE)) {
      add(found.index);
      who = found[1] || found[2] || found[3] || found[4];
      from = found.index + found[0].length;
    }
    add(text.length);
    if (leftOut && pieces.length) pieces[pieces.length - 1].leftOut = leftOut;
  }
  return pieces;
}

function pieceView(piece) {
  const box = el('div', {class: piece.sampled ? 'turn sampled' : 'turn'}, el('div', {class: 'who'}, piece.sampled ? 'model' : piece.who));
  let from = 0;
  const say = until => { const text = piece.text.slice(from, until).trim(); if (text) box.append(el('pre', {}, text)); };
  for (const found of piece.text.matchAll(PARTS)) {
    say(found.index);
    from = found.index + found[0].length;
    if (found[1] === 'think') box.append(el('details', {}, el('summary', {}, 'thoughts, ' + found[2].trim().length.toLocaleString('en-US') + ' characters'), el('pre', {}, found[2].trim())));
    else box.append(callView(found[1], found[2].trim()));
  }
  say(piece.text.length);
  if (piece.leftOut) box.append(el('p', {class: 'soft'}, piece.leftOut.toLocaleString('en-US') + ' more characters are not shown'));
  return box;
}

function callView(kind, text) {
  let call = null;
  if (kind === 'tool_call') try { call = JSON.parse(text); } catch { /* shown as it is: a call that no tool could read */ }
  if (call === null || typeof call !== 'object' || typeof call.name !== 'string') return el('div', {class: 'call'}, el('div', {class: 'who'}, kind === 'tool_call' ? 'tool call (not JSON)' : 'result of the tool'), el('pre', {}, text));
  const args = call.arguments !== null && typeof call.arguments === 'object' ? Object.entries(call.arguments) : [];
  return el('div', {class: 'call'}, el('div', {class: 'who'}, 'calls ', el('b', {}, call.name)),
    args.map(([name, value]) => el('div', {}, el('span', {class: 'soft'}, name + ': '), el('pre', {}, typeof value === 'string' ? value : JSON.stringify(value)))));
}

function conversation(sample) {
  const box = el('div'), pieces = piecesOf(sample.turns);
  const talk = () => replace(box, pieces.map(pieceView), sample.turns_left_out ? el('p', {class: 'soft'}, sample.turns_left_out + ' more turns are not shown') : null);
  const raw = () => replace(box, sample.turns.map(([sampled, text, leftOut]) => el('div', {class: sampled ? 'turn sampled' : 'turn'}, el('pre', {}, text), leftOut ? el('p', {class: 'soft'}, leftOut.toLocaleString('en-US') + ' more characters are not shown') : null)));
  let asTalk = true;
  const button = el('button', {onclick: () => { asTalk = !asTalk; (asTalk ? talk : raw)(); replace(button, asTalk ? 'as raw text' : 'as a conversation'); }}, 'as raw text');
  talk();
  return el('div', {}, box, el('div', {class: 'bar'}, button));
}

function sampleView(sample) {
  const said = sample.turns.filter(t => t[0]).map(t => t[1].replace(TURN_END, '')).join(' ⏎ ').slice(0, 400) || '(nothing sampled)';
  const asked = piecesOf(sample.turns).filter(p => !p.sampled).map(p => p.text).join(' ⏎ ').slice(0, 400);
  const kind = sample.solved === undefined ? '' : sample.solved ? 'solved' : 'wrong', answers = sample.turns.filter(t => t[0]).length;
  const badge = (text, extra) => el('span', {class: 'badge ' + (extra || '')}, text);
  const box = el('details', {class: 'sample'}, el('summary', {},
    badge('reward ' + (typeof sample.reward === 'number' ? shown(sample.reward, '') : '?'), kind), kind ? badge(kind, kind) : null,
    el('span', {class: 'soft'}, `step ${sample.step}, problem ${sample.problem}` + (answers > 1 ? `, ${answers} answers` : '') + (sample.versions && sample.versions.length ? `, weights of version ${sample.versions.join(', ')}` : '') + (sample.tokens ? `, ${sample.tokens} tokens` : '')),
    el('span', {class: 'preview'}, asked), el('span', {class: 'preview'}, said)));
  box.addEventListener('toggle', () => { if (box.open && !box.dataset.filled) { box.dataset.filled = '1'; box.append(conversation(sample)); } });
  return box;
}

// The part with filter and list. `find(source, query)` answers {samples, next, matching, all, held}; a report holds
// `held` of all samples, the dashboard finds every one.
function samplesPart(sources, find) {
  const source = el('select', {'aria-label': 'source', id: 'source'}, sources.map(name => el('option', {value: name}, name === 'training' ? 'trained on' : 'held out, ' + name.replace('-', ' ').replace(/ 0+(?=\d)/, ' '))));
  const number = (id, words) => el('input', {class: 'short', type: 'number', step: 'any', id, 'aria-label': words, placeholder: words});
  const least = number('least', 'least'), most = number('most', 'most'), first = number('first', 'first'), last = number('last', 'last');
  const text = el('input', {type: 'search', id: 'find', placeholder: 'find text', 'aria-label': 'find text'});
  const list = el('div', {id: 'samples'}), count = el('span', {class: 'soft', id: 'count'}), more = el('button', {hidden: true}, 'show more');
  let following = 0, asked = 0;
  async function load(from) {
    const mine = ++asked, query = {start: from, count: 20, least: least.value, most: most.value, first: first.value, last: last.value, text: text.value};
    const answer = await find(source.value, query);
    if (mine !== asked || !answer) return;
    if (!from) replace(list);
    fill(list, {}, answer.samples.map(sampleView));
    following = answer.next;
    more.hidden = following === null;
    replace(count, list.children.length + ' shown of ' + answer.matching.toLocaleString('en-US') + (text.value ? ' searched' : ' that fit') + ', ' + answer.all.toLocaleString('en-US') + ' in all' + (answer.held < answer.all ? `, ${answer.held} on this page` : ''));
  }
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(() => load(0), 250); };
  for (const input of [least, most, first, last, text]) input.addEventListener('input', later);
  source.addEventListener('change', () => load(0));
  more.addEventListener('click', () => load(following));
  const part = el('div', {}, el('div', {class: 'bar'}, source, el('label', {}, 'reward', least, '–', most), el('label', {}, 'step', first, '–', last), text, count), list, el('div', {class: 'bar'}, more));
  load(0);
  return part;
}

// The same filter over samples that are on the page already, for the report; `all` counts those of the run.
function filtered(samples, query, all) {
  const bound = (text, otherwise) => text === '' || text === undefined ? otherwise : Number(text);
  const numbers = samples.filter(s => {
    const free = query.least === '' && query.most === '';
    return (free || (s.reward >= bound(query.least, -Infinity) && s.reward <= bound(query.most, Infinity))) && s.step >= bound(query.first, 0) && s.step <= bound(query.last, Infinity);
  });
  const found = numbers.filter(s => s.turns.map(t => t[1]).join('\n').toLowerCase().includes(query.text.toLowerCase()));
  const page = found.slice(query.start, query.start + query.count), end = query.start + page.length;
  return {samples: page, next: end < found.length ? end : null, matching: numbers.length, all, held: samples.length};
}
