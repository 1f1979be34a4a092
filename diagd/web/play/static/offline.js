// A service worker: keeps the files of the page, and adds the headers that isolate it, without
// which browsers share no memory between threads. What has a version in its address is loaded once.

const CACHE = "diagd";
const HEADERS = {
  "cross-origin-opener-policy": "same-origin",
  "cross-origin-embedder-policy": "require-corp",
  "cross-origin-resource-policy": "same-origin",
};

addEventListener("install", () => skipWaiting());
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("fetch", (event) => {
  const { request } = event;
  const isOurs = request.method === "GET" && new URL(request.url).origin === location.origin;
  if (isOurs) event.respondWith(answer(event));
});

async function answer(event) {
  const {request} = event;
  const cache = await caches.open(CACHE), {search} = new URL(request.url);
  const isVersioned = /^\?v=/.test(search);
  const kept = await cache.match(request, {ignoreSearch: !isVersioned});
  if (kept && isVersioned) return isolated(kept);
  try {
    const fresh = await fetch(request);
    if (fresh.ok) event.waitUntil(keep(cache, request, fresh.clone(), isVersioned));
    return isolated(fresh);
  } catch (error) {
    if (kept) return isolated(kept);
    throw error;
  }
}

async function keep(cache, request, response, isVersioned) {
  try {
    if (isVersioned) await cache.delete(request, {ignoreSearch: true}); // an older version
    await cache.put(request, response);
  } catch {} // no room: then it is loaded each time
}

function isolated(response) {
  if (!response.status) return response; // a redirection, which the browser follows by itself
  const headers = new Headers(response.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  const {body, status, statusText} = response;
  return new Response(body, {status, statusText, headers});
}
