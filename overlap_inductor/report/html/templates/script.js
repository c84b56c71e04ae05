document.documentElement.classList.add('scripted');
const rows = [...document.querySelectorAll('.sites details')];
const box = document.getElementById('filter');
if (box) {
  const apply = () => {
    const wanted = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const hit = wanted.every(word => row.textContent.toLowerCase().includes(word));
      row.classList.toggle('hidden', !hit);
      shown += hit;
    }
    document.getElementById('shown').textContent = shown === rows.length ? '' : shown + ' of ' + rows.length + ' rows';
  };
  box.addEventListener('input', apply);
  document.getElementById('all').addEventListener('click', event => {
    const open = rows.some(row => !row.open);
    rows.forEach(row => { row.open = open; });
    event.target.textContent = open ? 'close all' : 'open all';
  });
}
const reveal = target => {
  for (let at = target; at; at = at.parentElement) if (at.tagName === 'DETAILS') at.open = true;
  target.scrollIntoView({block: 'center'});
};
document.addEventListener('click', event => {
  const link = event.target.closest('a[href^="#line-"]');
  const target = link && document.getElementById(link.getAttribute('href').slice(1));
  if (target) reveal(target);
});
const changes = [...document.querySelectorAll('[data-change]')];
let at = -1;
for (const button of document.querySelectorAll('[data-step]')) button.addEventListener('click', () => {
  if (!changes.length) return;
  if (changes[at]) changes[at].classList.remove('here');
  at = at < 0 ? (button.dataset.step > 0 ? 0 : changes.length - 1) : (at + Number(button.dataset.step) + changes.length) % changes.length;
  changes[at].classList.add('here');
  reveal(changes[at]);
});
