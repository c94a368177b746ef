// A playback whose frames came with the page; for panel.js it is what the studio's own is, without a server.
export class Playback {
  constructor(request, _whole, changed) {
    const { frames, note } = request.prepared[request.algorithm];
    Object.assign(this, { request, frames, note, length: frames.length, ended: true, failure: null, awaited: false, changed });
  }

  get last() {
    return this.frames.length - 1;
  }

  at(index) {
    return this.frames[Math.min(index, this.last)];
  }

  stop() {}
}
