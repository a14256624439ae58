// Sound: what a microphone hears or a file has as WAV, and speech that comes in pieces as something to play.

const RATE = 16000; // what models that hear are trained on, samples a second
const SPEECH_RATE = 24000; // of pieces of speech (pcm16), samples a second
const MOST_S = 600; // seconds of one recording

/** 16-bit samples of one channel as a WAV file. */
export function wav(samples, rate) {
  const head = new DataView(new ArrayBuffer(44));
  const word = (at, text) => [...text].forEach((char, i) => head.setUint8(at + i, char.charCodeAt(0)));
  const size = samples.byteLength;
  word(0, "RIFF"); head.setUint32(4, 36 + size, true); word(8, "WAVEfmt ");
  head.setUint32(16, 16, true); head.setUint16(20, 1, true); head.setUint16(22, 1, true);
  head.setUint32(24, rate, true); head.setUint32(28, rate * 2, true); head.setUint16(32, 2, true); head.setUint16(34, 16, true);
  word(36, "data"); head.setUint32(40, size, true);
  return new Blob([head, samples], { type: "audio/wav" });
}

/** Anything that the browser can play, as WAV of one channel at 16 kHz. */
export async function toWav(blob) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const sound = await context.decodeAudioData(await blob.arrayBuffer());
  const mixed = new OfflineAudioContext(1, Math.max(1, Math.ceil(sound.duration * RATE)), RATE);
  const source = mixed.createBufferSource();
  source.buffer = sound;
  source.connect(mixed.destination);
  source.start();
  const floats = (await mixed.startRendering()).getChannelData(0);
  return wav(Int16Array.from(floats, (v) => Math.max(-1, Math.min(1, v)) * 32767), RATE);
}

/** Pieces of speech in base64 as one file to play; null where there are none. */
export function speech(pieces) {
  if (!pieces.length) return null;
  const parts = pieces.map((piece) => Uint8Array.from(atob(piece), (char) => char.charCodeAt(0)));
  const start = String.fromCharCode(...parts[0].slice(0, 4));
  if (start === "RIFF") return new Blob(parts, { type: "audio/wav" });
  if (start.startsWith("ID3") || (parts[0][0] === 0xff && parts[0][1] >= 0xe0 && parts[0][1] !== 0xff)) return new Blob(parts, { type: "audio/mpeg" });
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) { bytes.set(part, at); at += part.length; }
  return wav(bytes.slice(0, bytes.length - (bytes.length % 2)), SPEECH_RATE);
}

export const canRecord = () => Boolean(globalThis.isSecureContext && navigator.mediaDevices?.getUserMedia && globalThis.MediaRecorder);

/** Listen to the microphone; resolves once it runs, with stop() -> WAV and cancel(). */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.ondataavailable = (event) => parts.push(event.data);
  const done = new Promise((resolve) => { recorder.onstop = resolve; });
  const end = () => {
    clearTimeout(limit);
    if (recorder.state !== "inactive") recorder.stop();
    for (const track of stream.getTracks()) track.stop();
  };
  const limit = setTimeout(end, MOST_S * 1000);
  recorder.start();
  return {
    async stop() {
      end();
      await done;
      return toWav(new Blob(parts, { type: recorder.mimeType }));
    },
    cancel: end,
  };
}
