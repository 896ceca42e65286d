// The playground: puts the parts together.

import { $, drawIcons } from "../dom.js";
import { useKeys } from "../key.js";

drawIcons();
useKeys($("#show-key"));
