"""Colours and line styles: a codec looks the same in every figure.

Every known codec's colour has a contrast of 3 to 1 or more with the light and the dark page. For people who
see no red, no green or no blue, any two colours still differ by 19 or more in CIELAB. Markers differ as well.
The line of auto is dashed, because it often covers that of the codec it chose.
"""

from typing import Any

KNOWN = {
    "fp32": "#74727f",
    "fp16": "#0da1cc",
    "int8": "#5262c2",
    "int4": "#158248",
    "onebit": "#e65b00",
    "auto": "#ad1bff",
}
SPARE = ("#b8860b", "#d6336c", "#0c8599", "#8d6e63", "#5f7a00", "#6741d9")
MARKS = {
    "fp32": "square",
    "fp16": "triangle-up",
    "int8": "circle",
    "int4": "diamond",
    "onebit": "triangle-down",
    "auto": "cross",
}
#: Every marker as an SVG path around the origin, for legends outside figures.
SHAPES = {
    "square": "M-4-4h8v8h-8z",
    "triangle-up": "M0-5L5 4H-5z",
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "diamond": "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "triangle-down": "M0 5L5-4H-5z",
    "cross": "M-1.5-5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
}
DASHED = ("auto", "plain")
#: The parts of a step, in colours that no codec has.
PARTS = {"compute": "#a3adb8", "wait": "#f0b429", "encode": "#c9a27a", "wire": "#8f6540", "decode": "#e3cfb4"}
#: From much noise to little.
SCALE = [[0.0, "#fdf0d5"], [0.25, "#cfe3ee"], [0.65, "#85b7dd"], [1.0, "#174a80"]]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def styles(names: list[str]) -> dict[str, dict[str, str]]:
    """Return colour, dash and marker of every codec; those without their own take spare colours in turn."""
    spare = [name for name in sorted(names) if name not in KNOWN]
    return {name: _style(name, spare) for name in names}


def _style(name: str, spare: list[str]) -> dict[str, str]:
    dash = "dash" if name in DASHED else "solid"
    if name in KNOWN:
        return {"colour": KNOWN[name], "dash": dash, "symbol": MARKS[name]}
    number = spare.index(name)
    return {
        "colour": SPARE[number % len(SPARE)],
        "dash": dash,
        "symbol": list(SHAPES)[number % len(SHAPES)],
    }


def template(ink: str, faint: str, grid: str, surface: str) -> dict[str, Any]:
    """Return plotly's defaults for what a figure does not set itself."""
    axis = {
        "gridcolor": grid,
        "zeroline": False,
        "linecolor": grid,
        "tickfont": {"color": faint, "size": 12},
        "title": {"font": {"color": faint, "size": 12}, "standoff": 8},
        "ticks": "",
        "automargin": True,
    }
    return {
        "layout": {
            "font": {"family": FONT, "size": 13, "color": ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
            "hoverlabel": {"bgcolor": surface, "bordercolor": grid, "font": {"color": ink, "family": FONT}},
            "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        }
    }


TEMPLATES = {
    "light": template(ink="#1c2430", faint="#5c6673", grid="#e6e9ed", surface="#ffffff"),
    "dark": template(ink="#e7eaee", faint="#9aa4b0", grid="#2b323b", surface="#1b2027"),
}
