// The learner away from the page's thread. It does one step a message, so that what the page asks for next is heard at once.
import { Learner } from "./learner.js";

let learner = null;

const asks = {
  start: ({ seed }) => {
    learner = new Learner(seed);
    return { parameters: learner.parameters };
  },
  tune: ({ settings }) => learner.fineTune(settings),
  begin: () => learner.beginReinforcement(),
  again: () => learner.again(),
  reinforce: ({ settings }) => learner.reinforce(settings),
  exam: ({ settings }) => learner.exam(settings),
};

self.addEventListener("message", ({ data }) => self.postMessage({ id: data.id, ask: data.ask, found: asks[data.ask](data) ?? null }));
