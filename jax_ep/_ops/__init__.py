"""Operations inside jit: their public functions down to custom calls."""
