"""Forecasts the whole horizon at once: exponential smoothing of the window, corrected by an LSTM.

After the winner of the M4 competition (Smyl 2020, https://doi.org/10.1016/j.ijforecast.2019.03.017). Missing steps are
ignored. Shapes: B batch, L steps of history, H horizon, C channels (value, calendar, observed), P steps of a season, K
seasons.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, huber_loss

from wellfed import ConfigError, LossOutput
from workloads.forecast.seasonal_naive import in_seasons

WindowBatch = dict[str, Tensor]
"""``history`` [B, L, C], ``future_known`` [B, H, C - 2], ``target`` and ``target_observed`` [B, H]. Other entries are
for evaluation."""

SMALLEST_SPREAD = 0.02
"""Minimum spread of a window, in standard deviations of the train part, so that constant windows are not amplified."""


RATES = {"season": 1.4, "trend": -2.0, "slope": 1.4, "fast": 0.0, "slow": 3.0, "mix": 0.0}
"""Initial logits: a season keeps 0.8; the trend's share that goes on is 0.12, and it keeps 0.8 per season; a fast level
keeps 0.5 and a slow level 0.95 per step; the fast level's share is 0.5."""
STEP = 10.0
"""Logits per unit of a rate's parameter. Adam moves all parameters alike, and logits need larger changes."""
TINY = 1e-9


class LSTMForecaster(nn.Module):
    """A network that adds an LSTM's correction to the smoothed level and season; it reads the window and the future
    calendar.

    Args:
        horizon: H. The data also pass ``num_channels`` C, ``season`` P and ``num_series``.
        hidden_size: width of the head and of the ``num_layers`` LSTM layers.
        dropout: share dropped between the layers and before the head, in training.
        huber_delta: error, in spreads of the window, above which the loss is linear.
    """

    def __init__(
        self,
        horizon: int,
        num_channels: int,
        season: int,
        num_series: int,
        *,
        hidden_size: int = 64,
        num_layers: int = 2,
        dropout: float = 0.1,
        huber_delta: float = 0.5,
    ) -> None:
        super().__init__()
        ConfigError.check(
            "workload.model",
            ("hidden_size", hidden_size, hidden_size >= 1, "is below 1", "hidden_size=2 or so"),
            ("num_layers", num_layers, num_layers >= 1, "is below 1", "num_layers=2 or so"),
            ("dropout", dropout, 0 <= dropout < 1, "is not in [0, 1)", "dropout=0.1 or so"),
            ("huber_delta", huber_delta, huber_delta > 0, "is not above 0", "huber_delta=0.5"),
        )
        self.huber_delta = huber_delta
        self.smoothing = Smoothing(season, horizon, num_series)
        self.lstm = nn.LSTM(
            num_channels + 1, hidden_size, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size + horizon * (num_channels - 2), hidden_size)
        self.out = nn.Linear(hidden_size, horizon)
        nn.init.zeros_(self.out.weight)  # training starts from the smoothed forecast
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: WindowBatch) -> Tensor:
        """Returns forecasts [B, H], float32, in the units of ``target``."""
        forecast_BH, _ = self._forecast(batch)
        return forecast_BH

    def loss(self, batch: WindowBatch) -> LossOutput:
        """Returns Huber's loss in spreads of the window, and the mean absolute error ``mae`` in standard deviations."""
        forecast_BH, spread_B1 = self._forecast(batch)
        seen_BH = batch["target_observed"].float()
        share_B1 = 1 / seen_BH.sum(1, keepdim=True).clamp(min=1)
        error_BH = (forecast_BH - batch["target"].float()) * seen_BH
        scaled_BH = error_BH / spread_B1
        each_BH = huber_loss(scaled_BH, torch.zeros_like(scaled_BH), reduction="none", delta=self.huber_delta)
        mae = (error_BH.detach().abs() * share_B1).sum(1).mean()
        return LossOutput((each_BH * share_B1).sum(1).mean(), {"mae": mae}, num_samples=len(seen_BH))

    def _forecast(self, batch: WindowBatch) -> tuple[Tensor, Tensor]:
        """Returns forecasts [B, H] and the spread of each window [B, 1]."""
        history_BLC = batch["history"]
        with torch.autocast(history_BLC.device.type, enabled=False):
            observed_BL = history_BLC[..., -1].float()
            value_BL = history_BLC[..., 0].float() * observed_BL
            base_BH, level_B1, rest_BL = self.smoothing(value_BL, observed_BL, batch["series"])
            deviation_BL = (value_BL - level_B1) * observed_BL
            count_B1 = observed_BL.sum(1, keepdim=True).clamp(min=1)
            variance_B1 = deviation_BL.square().sum(1, keepdim=True) / count_B1
            spread_B1 = variance_B1.clamp(min=SMALLEST_SPREAD**2).sqrt()  # a root has infinite slope at 0
            own_BL2 = torch.stack((deviation_BL, rest_BL), 2) / spread_B1.unsqueeze(2)
        dtype = self.head.weight.dtype
        steps_BLD = torch.cat((own_BL2.to(dtype), history_BLC[..., 1:].to(dtype)), 2)
        hidden_BLD, _ = self.lstm(steps_BLD)
        known_BD = torch.cat((hidden_BLD[:, -1], batch["future_known"].to(hidden_BLD.dtype).flatten(1)), 1)
        added_BH = self.out(self.dropout(gelu(self.head(known_BD))))
        return base_BH + spread_B1 * added_BH.float(), spread_B1


class Smoothing(nn.Module):
    """Exponential smoothing of season, trend and level. Its rates are learned: one for all series, and an offset for
    each.

    The season consists of deviations from its mean. The level is the series without season, a mix of a fast and a slow
    mean for each step of the horizon. The trend is the change of a season's mean.
    """

    def __init__(self, season: int, horizon: int, num_series: int) -> None:
        super().__init__()
        self.season, self.horizon = season, horizon
        self.shared_R = nn.Parameter(torch.tensor(list(RATES.values())) / STEP)
        self.own_SR = nn.Parameter(torch.zeros(num_series, len(RATES)))
        self.mix_H = nn.Parameter(torch.zeros(horizon))  # offset of the logit of the fast level's share, by step

    def forward(self, value_BL: Tensor, observed_BL: Tensor, series_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the forecast [B, H], the slow level [B, 1], and each step without season and level [B, L]."""
        own_BR = self.own_SR.float().index_select(0, series_B)
        logit_BR = STEP * (self.shared_R.float() + own_BR)
        of_season_B1, trend_B1, of_slope_B1, of_fast_B1, of_slow_B1, _ = logit_BR.sigmoid().tensor_split(len(RATES), 1)
        mix_BH = (logit_BR[:, -1:] + STEP * self.mix_H.float()).sigmoid()

        season_BP, change_B1 = self._season_and_trend(value_BL, observed_BL, of_season_B1, of_slope_B1)
        length = value_BL.shape[1]
        plain_BL = (value_BL - season_BP.repeat(1, -(-length // self.season))[:, -length:]) * observed_BL
        fast_B1, slow_B1 = (_smoothed(plain_BL, observed_BL, keep_B1) for keep_B1 in (of_fast_B1, of_slow_B1))

        step_H = torch.arange(self.horizon, device=value_BL.device)
        seasons_H = step_H // self.season + 1
        forecast_BH = season_BP[:, step_H % self.season] + slow_B1 + mix_BH * (fast_B1 - slow_B1)
        return forecast_BH + trend_B1 * change_B1 * seasons_H, slow_B1, (plain_BL - slow_B1) * observed_BL

    def _season_and_trend(
        self, value_BL: Tensor, observed_BL: Tensor, of_season_B1: Tensor, of_slope_B1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the deviation of each phase from the season's mean [B, P], and the change of that mean [B, 1].

        Unseen phases are 0. The mean of a season with gaps is biased, so such a season counts less for the deviations
        and is ignored for the change.
        """
        value_BKP, seen_BKP = in_seasons(value_BL, self.season), in_seasons(observed_BL, self.season)
        count_BK = seen_BKP.sum(2)
        mean_BK = value_BKP.sum(2) / count_BK.clamp(min=1)
        age_K = torch.arange(value_BKP.shape[1] - 1, -1, -1, device=value_BL.device)
        share_BK = count_BK / self.season
        weight_BKP = seen_BKP * (of_season_B1**age_K * share_BK**4).unsqueeze(2)
        deviation_BKP = (value_BKP - mean_BK.unsqueeze(2)) * weight_BKP
        season_BP = deviation_BKP.sum(1) / weight_BKP.sum(1).clamp(min=TINY)
        full_BK = (share_BK == 1).float()
        weight_BK = full_BK[:, 1:] * full_BK[:, :-1] * of_slope_B1 ** age_K[1:]
        change_BK = (mean_BK[:, 1:] - mean_BK[:, :-1]) * weight_BK
        return season_BP, change_BK.sum(1, keepdim=True) / weight_BK.sum(1, keepdim=True).clamp(min=TINY)


def _smoothed(value_BL: Tensor, observed_BL: Tensor, keep_B1: Tensor) -> Tensor:
    """Returns the weighted mean of the observed values, [B, 1]; each older step counts ``keep_B1`` times the next."""
    length = value_BL.shape[1]
    age_L = torch.arange(length - 1, -1, -1, device=value_BL.device)
    age_BL = torch.where(observed_BL > 0, age_L, length)
    weight_BL = observed_BL * keep_B1 ** (age_BL - age_BL.amin(1, keepdim=True))  # the last observed step has weight 1
    return (value_BL * weight_BL).sum(1, keepdim=True) / weight_BL.sum(1, keepdim=True).clamp(min=TINY)
