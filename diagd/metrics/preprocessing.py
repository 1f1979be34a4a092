"""How frames become what the detector of FVD reads (see `diagd.metrics.fvd`)."""

from typing import Literal

MIN_FRAMES = 10  # I3D halves time three times and pools the rest: shorter clips give no features

# crop: the short side to 224 px, then the centre; stretch: straight to 224 x 224 px;
# detector: pixels in [0, 255] as they are, scaled and stretched by the TorchScript itself
Preprocessing = Literal["crop", "stretch", "detector"]
