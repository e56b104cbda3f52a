/* Browsers start no workers on pages that are opened from a disk, so the site's search would not work there.
   This runs its script in a hidden frame instead. */

function load(url, document) {
  return new Promise((finished) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = finished;
    document.head.append(script);
  });
}

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    this.inside.document.open(); // otherwise Firefox replaces the empty document later
    this.inside.document.close();

    // What the script expects of a worker:
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.inside.importScripts = async (...urls) => {
      for (const each of urls) await load(each, this.inside.document);
    };
    this.ready = load(url, this.inside.document);
  }

  async postMessage(data) {
    await this.ready;
    this.inside.dispatchEvent(new MessageEvent("message", { data }));
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = FrameWorker; // Material looks for this name to find the scripts for other languages
  window.Worker = FrameWorker;
}
