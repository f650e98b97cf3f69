/* What the pages of the dashboard share: the bar at the top, asking the server, telling when it does not answer. */
(function (Holter) {
  'use strict';

  const { el } = Holter;
  const GONE = 'The dashboard does not answer. Is `holter serve` still running? What you see is as it was.';
  const LOCKED = 'This page needs the token: open the address that `holter serve` printed.';

  const trouble = el('p', { class: 'trouble', role: 'status', hidden: true });

  /** The bar: the way back to all runs, and what is said of this page. */
  function bar(...children) {
    document.getElementById('bar').replaceChildren(el('header', { class: 'masthead' }, children), trouble);
  }

  const told = { server: '', page: '' };

  /** What is wrong, until the same one says otherwise: the page with what it shows, or the server with its answers. */
  function tell(words, by = 'page') {
    told[by] = words;
    trouble.textContent = told.server || told.page;
    trouble.hidden = !trouble.textContent;
  }

  function asItWas(words) {
    const said = Holter.named(words, 400).replace(/[.]$/, '');
    return `${said.charAt(0).toUpperCase()}${said.slice(1)}. What you see is as it was.`;
  }

  class Refused extends Error {}

  /** The JSON at an address. Throws Refused with the server's words; other failures are told on the page. */
  async function ask(address) {
    let answer;
    try {
      answer = await fetch(address, { cache: 'no-cache', headers: { Accept: 'application/json' } });
    } catch (error) {
      tell(GONE, 'server');
      throw error;
    }
    tell(answer.status === 401 ? LOCKED : '', 'server');
    if (answer.ok) return { json: await answer.json(), tag: answer.headers.get('etag') };
    const said = await answer.json().catch(() => ({}));
    throw new Refused(typeof said.error === 'string' ? said.error : `The server answered ${answer.status}.`);
  }

  /** Calls `work` again and again, so long after it was done; not while nobody sees the page. */
  function repeat(work, pause) {
    let timer = null, busy = false;
    async function round() {
      clearTimeout(timer);
      if (busy || document.hidden) return;
      busy = true;
      try {
        await work();
      } catch (error) {
        if (error instanceof Refused) tell(asItWas(error.message));
        else if (!(error instanceof TypeError)) throw error; // that the server is gone is told already
      } finally {
        busy = false;
        timer = setTimeout(round, pause);
      }
    }
    document.addEventListener('visibilitychange', round);
    round();
  }

  /** Seconds since 1970 as people say it. */
  function ago(seconds) {
    if (typeof seconds !== 'number') return '–';
    const past = Date.now() / 1000 - seconds;
    return past < 5 ? 'now' : `${Holter.duration(past)} ago`;
  }

  function date(seconds) {
    return new Date(seconds * 1000).toLocaleString([], { dateStyle: 'medium', timeStyle: 'short' });
  }

  Holter.frame = { bar, tell, asItWas, ask, Refused, repeat, ago, date };
})((window.Holter = window.Holter || {}));
