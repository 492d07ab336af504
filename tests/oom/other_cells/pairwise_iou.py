# The overlap of all boxes with all boxes.
# %%
boxes = torch.rand(3000, 4, device="cuda").cumsum(1)
scores = torch.rand(3000, device="cuda")
# %%
area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
lt = torch.max(boxes[:, None, :2], boxes[None, :, :2])
rb = torch.min(boxes[:, None, 2:], boxes[None, :, 2:])
inter = (rb - lt).clamp(min=0).prod(dim=2)
iou = inter / (area[:, None] + area[None, :] - inter)
keep = (iou > 0.5).sum(1) < 3
