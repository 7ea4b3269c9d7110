"use strict";
(() => {
  const root = document.documentElement;
  const themes = ["auto", "light", "dark"];
  const said = { auto: "as the system has them", light: "light", dark: "dark" };
  const button = document.getElementById("theme");
  const kept = { get: () => { try { return localStorage.getItem("cdr-theme"); } catch { return null; } },
                 set: (value) => { try { localStorage.setItem("cdr-theme", value); } catch { /* a file may keep nothing */ } } };
  let theme = "auto";
  function show(value) {
    theme = themes.includes(value) ? value : "auto";
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.querySelector(".what").textContent = theme[0].toUpperCase() + theme.slice(1);
    button.setAttribute("aria-label", "Colours: " + said[theme]);
  }
  if (button) {
    show(new URLSearchParams(location.search).get("theme") || kept.get());
    button.hidden = false;
    button.addEventListener("click", () => { show(themes[(themes.indexOf(theme) + 1) % 3]); kept.set(theme); });
  }

  const save = document.getElementById("save");
  if (save) {
    save.hidden = false;
    save.addEventListener("click", () => {
      const data = new Blob([document.getElementById("cdr-data").textContent], { type: "application/json" });
      const link = document.createElement("a");
      link.href = URL.createObjectURL(data);
      link.download = "report.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  const tip = document.getElementById("tip");
  function tell(disc) {
    const head = document.createElement("b");
    const many = disc.dataset.said.includes(",");
    head.textContent = (many ? "Windows " : "Window ") + disc.dataset.said + " \u00b7 " + disc.dataset.id;
    const text = document.createElement("bdi");
    text.textContent = disc.dataset.text;
    tip.replaceChildren(head, text);
    tip.hidden = false;
    const at = disc.querySelector("circle").getBoundingClientRect();
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - box.width / 2), innerWidth - box.width - 8);
    const above = at.top - box.height - 10;
    tip.style.left = left + "px";
    tip.style.top = (above > 8 ? above : Math.min(at.bottom + 10, innerHeight - box.height - 8)) + "px";
  }
  const hide = () => { tip.hidden = true; };
  for (const disc of document.querySelectorAll(".disc")) {
    disc.addEventListener("pointerenter", () => tell(disc));
    disc.addEventListener("pointerleave", hide);
    disc.addEventListener("focus", () => tell(disc));
    disc.addEventListener("blur", hide);
    disc.addEventListener("click", (event) => { event.preventDefault(); hide(); go(disc.getAttribute("href").slice(1), true); });
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });

  for (const field of document.querySelectorAll("fieldset.choose")) {
    field.hidden = false;
    const map = field.closest("figure").querySelector(".map");
    field.addEventListener("change", (event) => {
      const wanted = event.target.value;
      map.classList.toggle("some", wanted !== "");
      for (const disc of map.querySelectorAll(".disc")) {
        const on = wanted === "" || disc.dataset.windows.split(" ").includes(wanted);
        disc.classList.toggle("on", on);
        disc.setAttribute("tabindex", on ? "0" : "-1");
      }
    });
  }

  // What a link or an address points at may be folded away.
  function go(id, focus) {
    const target = document.getElementById(id);
    if (!target) return;
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    if (focus) {
      history.replaceState(null, "", "#" + id);
      target.scrollIntoView({ block: "center" });
      target.focus({ preventScroll: true });
    }
  }
  if (location.hash) { go(location.hash.slice(1), false); document.getElementById(location.hash.slice(1))?.scrollIntoView(); }
  addEventListener("hashchange", () => go(location.hash.slice(1), false));
  addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details.envelope")) part.open = true; });
})();
