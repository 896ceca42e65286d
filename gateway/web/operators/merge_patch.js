// JSON Merge Patch (RFC 7396). Results have no prototype, because a tenant may have the name `__proto__`.

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Returns `target` after `patch`. Objects of `target` are changed in place. */
export function merged(target, patch) {
  if (!isObject(patch)) return patch;
  const result = isObject(target) ? target : Object.create(null);
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else result[name] = merged(result[name], value);
  }
  return result;
}
