// JSON Merge Patch (RFC 7396). What comes out has no prototype: a tenant may be called `__proto__`.

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** `target` after `patch`; objects of `target` are changed in place. */
export function merged(target, patch) {
  if (!isObject(patch)) return patch;
  const result = isObject(target) ? target : Object.create(null);
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else result[name] = merged(result[name], value);
  }
  return result;
}
