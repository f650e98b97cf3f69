/* The page of a run on the dashboard: the same as in a report, fetched, and brought up to date while it trains. */
(function (Holter) {
  'use strict';

  const { el, named } = Holter;
  const { ask, tell, asItWas, Refused } = Holter.frame;
  const PAUSE = 700; // milliseconds between two updates, at least
  const AGAIN = 2000; // milliseconds until the server is asked again after it refused
  const FIRST = 'gradient/norm';
  const id = decodeURIComponent(window.location.pathname.split('/').pop());
  const home = `/api/run/${encodeURIComponent(id)}`;

  const state = { view: null, source: null, timer: null, busy: false, due: false, at: 0, close: new Map() };
  const pulse = el('span', { class: 'pulse muted small', role: 'status' });

  // Fetching ------------------------------------------------------------------------------------------------------

  /** The map that the strip chart shows. */
  function chosen() {
    return document.querySelector('.strip .chip[aria-pressed="true"]')?.dataset.key?.replace(/^map /, '') || FIRST;
  }

  async function refresh() {
    if (state.busy) {
      state.due = true;
      return;
    }
    [state.busy, state.due, state.at] = [true, false, Date.now()];
    try {
      // The others are asked for by the strip chart, when they are chosen.
      const { json } = await ask(`${home}?map=${chosen() === FIRST ? encodeURIComponent(FIRST) : 'none'}`);
      state.view = json;
      tell('');
      await show();
    } catch (error) {
      if (error instanceof Refused && !document.hidden) later(AGAIN);
      failed(error);
    } finally {
      state.busy = false;
      if (state.due) later();
    }
  }

  function later(pause = PAUSE) {
    clearTimeout(state.timer);
    state.timer = setTimeout(refresh, Math.max(0, pause - (Date.now() - state.at)));
  }

  async function loadMap(wanted) {
    const { json } = await ask(`${home}/map?map=${encodeURIComponent(wanted)}`);
    return json && fitting(json);
  }

  /** A map with finer columns for the steps that are looked at, where it has fewer than there are steps. */
  async function fitting(map) {
    const range = Holter.charts.range(), last = map.steps[map.steps.length - 1];
    if (!range || map.steps.length < 2 || map.steps.length > last - map.steps[0]) return map;
    const [from, to] = [Math.max(0, Math.floor(range[0])), Math.max(0, Math.ceil(range[1]))];
    const key = JSON.stringify([map.id, from, to]);
    if (state.close.has(key)) return state.close.get(key);
    try {
      const { json } = await ask(`${home}/zoom?map=${encodeURIComponent(map.id)}&from=${from}&to=${to}`);
      if (!json) return map;
      state.close.clear();
      if (to <= last) state.close.set(key, json); // what is past stays as it was
      return json;
    } catch (error) {
      failed(error);
      return map; // coarse as it is
    }
  }

  async function layerDetail(layer) {
    return (await ask(`${home}/layer?layer=${encodeURIComponent(layer.toWellFormed())}`)).json;
  }

  // Showing -------------------------------------------------------------------------------------------------------

  async function show() {
    const view = state.view;
    const maps = await Promise.all(view.maps.map(fitting));
    if (view !== state.view) return;
    document.title = `${named(view.run.name, 60)} · Holter`;
    Holter.showRun({ ...view, maps }, { layerDetail, loadMap, onZoom: () => show().catch(failed) });
  }

  function failed(error) {
    if (error instanceof Refused) refused(error.message);
    else if (!(error instanceof TypeError)) throw error; // that the server is gone is told already
  }

  /** What was seen of the run stays. */
  function refused(words) {
    if (state.view) {
      tell(asItWas(words));
      return;
    }
    document.getElementById('page').replaceChildren(el('main', { class: 'list' }, el('h1', {}, named(id)),
      el('p', { class: 'note' }, Holter.icon('warning'), el('span', {}, named(words, 400)))));
  }

  // Following -----------------------------------------------------------------------------------------------------

  /** Not while nobody sees it: a browser keeps few connections to a server. */
  function follow() {
    if (document.hidden) {
      state.source?.close();
      state.source = null;
    } else if (!state.source) {
      state.source = new EventSource(`${home}/events`);
      state.source.onmessage = (event) => heard(JSON.parse(event.data));
      state.source.onerror = lost;
    }
  }

  /** A browser connects again by itself, but not where the server refused. Why it did is told by what is asked next. */
  function lost() {
    beat(false);
    later();
    if (state.source?.readyState !== EventSource.CLOSED) return;
    state.source = null;
    setTimeout(follow, AGAIN);
  }

  function heard(news) {
    beat(news.state === 'running' && !news.trouble);
    if (news.trouble) refused(news.trouble);
    else later();
  }

  function beat(isLive) {
    pulse.textContent = isLive ? 'Live' : '';
    pulse.classList.toggle('live', isLive);
  }

  Holter.frame.bar(el('a', { class: 'back', href: '/' }, '← All runs'), pulse);
  document.addEventListener('visibilitychange', follow);
  refresh().finally(follow); // reading on in a long run would take the processor from what is to be seen first
})((window.Holter = window.Holter || {}));
