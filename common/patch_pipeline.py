"""Draws images with a UNet2DModel that sees squares of pixels as channels (`--patch_size`). train_unet.py --convert copies this file into the folders
that it makes of such models:

    from diffusers import DiffusionPipeline
    pipeline = DiffusionPipeline.from_pretrained("out_diffusers", trust_remote_code=True)  # which runs this file
    pipeline(batch_size=4).images[0].save("samples_diffusers.png")
"""

import torch
from diffusers import DDPMPipeline, ImagePipelineOutput, SchedulerMixin, UNet2DModel
from diffusers.utils.torch_utils import randn_tensor


class PatchPipeline(DDPMPipeline):
    """DDPMPipeline of a model whose pixels are squares of patch_size x patch_size pixels of the image."""

    def __init__(self, unet: UNet2DModel, scheduler: SchedulerMixin, patch_size: int = 2) -> None:  # what has no default, diffusers takes for a model
        super().__init__(unet, scheduler)
        self.register_to_config(patch_size=patch_size)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        generator: torch.Generator | None = None,
        num_inference_steps: int = 1000,
        class_labels: torch.Tensor | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """class_labels: (batch_size), which models with classes need. output_type: pil, or np for float (N, H, W, C) in [0, 1]."""
        size = self.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (batch_size, self.unet.config.in_channels, height, width)
        image = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=self.unet.dtype)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.progress_bar(self.scheduler.timesteps):
            answer = self.unet(image, t, class_labels=class_labels).sample
            image = self.scheduler.step(answer, t, image, generator=generator).prev_sample
        image = torch.nn.functional.pixel_shuffle(image, self.config.patch_size)
        pixels = (image / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().cpu().numpy()
        return ImagePipelineOutput(images=self.numpy_to_pil(pixels) if output_type == "pil" else pixels)
