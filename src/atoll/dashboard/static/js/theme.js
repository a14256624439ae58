// Before anything is drawn: the theme that was chosen, if one was.
try {
  const theme = localStorage.getItem("atoll-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // No storage: the system's theme it is.
}
